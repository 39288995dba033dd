"""vLLM on the CPU, by its LLMEngine."""

from __future__ import annotations

import os
from typing import Any

from peer_loop import Peer, serve


class Vllm(Peer):
    """Its engine runs in a process of its own; a request that arrives during a step is sent after it."""

    def __init__(self, job: dict[str, Any]) -> None:
        gib = max(1, -(-int(1.25 * job["kv_bytes"]) // 2**30))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(gib)
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self.params = lambda n: vllm.SamplingParams(
            temperature=0,
            max_tokens=n,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        options = {
            "dtype": job["dtype"],
            "max_model_len": job["max_len"] + 1,
            "max_num_seqs": job["max_seqs"],
            "enable_prefix_caching": job["prefix_caching"],
        }
        self.engine = vllm.LLM(job["model"], **options).llm_engine
        self.about = {"version": vllm.__version__, **options, "VLLM_CPU_KVCACHE_SPACE": gib}

    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    def add(self, index: int, prompt: list[int], max_new: int) -> None:
        self.engine.add_request(str(index), {"prompt_token_ids": prompt}, self.params(max_new))

    def busy(self) -> bool:
        return self.engine.has_unfinished_requests()

    def step(self) -> list[tuple[int, list[int]]]:
        return [(int(o.request_id), list(o.outputs[0].token_ids)) for o in self.engine.step() if o.outputs]


if __name__ == "__main__":
    serve(Vllm)
