"""OpenVINO GenAI's ContinuousBatchingPipeline, on a model exported by optimum-intel."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy
import openvino
import openvino_genai
from peer_loop import CannotRun, Peer, serve

PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}  # of products and of the KV cache


class OpenVino(Peer):
    """Its cache of prefixes cannot be emptied, so where it is on, each run has a pipeline of its own."""

    def __init__(self, job: dict[str, Any]) -> None:
        if job["dtype"] not in PRECISIONS:
            raise CannotRun(f"its precisions are {', '.join(PRECISIONS)}, not {job['dtype']}")
        precision = PRECISIONS[job["dtype"]]
        self.model, self.fresh = job["model"], True
        self.options = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": job["threads"],
        }
        self.scheduler = openvino_genai.SchedulerConfig()
        self.scheduler.cache_size = max(1, -(-int(1.1 * job["kv_bytes"]) // 2**30))
        self.scheduler.max_num_batched_tokens = job["token_budget"]
        self.scheduler.max_num_seqs = job["max_seqs"]
        self.scheduler.enable_prefix_caching = job["prefix_caching"]
        self.pipe = self._pipeline()
        self.handles: dict[int, Any] = {}
        self.about = {
            "version": version("openvino-genai"),
            **self.options,
            "cache_size": self.scheduler.cache_size,
            "enable_prefix_caching": self.scheduler.enable_prefix_caching,
        }

    def _pipeline(self) -> Any:
        return openvino_genai.ContinuousBatchingPipeline(self.model, self.scheduler, "CPU", self.options)

    def reset(self) -> None:
        if self.scheduler.enable_prefix_caching and not self.fresh:
            self.pipe = None  # two of them would need twice the memory
            self.pipe = self._pipeline()
        self.fresh = False

    def add(self, index: int, prompt: list[int], max_new: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_new
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        self.handles[index] = self.pipe.add_request(index, ids, config)

    def busy(self) -> bool:
        return self.pipe.has_non_finished_requests()

    def step(self) -> list[tuple[int, list[int]]]:
        self.pipe.step()
        made = []
        for index, handle in list(self.handles.items()):
            if handle.can_read():
                made += [(index, list(output.generated_ids)) for output in handle.read().values()]
            elif handle.get_status().name != "RUNNING":
                del self.handles[index]
        return made


if __name__ == "__main__":
    serve(OpenVino)
