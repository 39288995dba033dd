"""llama.cpp by its C API: one shared batch a step, decode first, then pieces of prompts, as its server does it."""

from __future__ import annotations

from typing import Any

import llama_cpp as lib
import numpy
from peer_loop import CannotRun, Peer, serve

F32 = 0  # GGML_TYPE_F32; its default for the KV cache is F16


class LlamaCpp(Peer):
    """`slots` has the running requests by sequence: the next token to compute, and how many tokens are left to make."""

    def __init__(self, job: dict[str, Any]) -> None:
        lib.llama_backend_init()
        self.quiet = lib.llama_log_callback(lambda level, text, data: None)  # kept alive
        lib.llama_log_set(self.quiet, None)
        self.model = lib.llama_model_load_from_file(job["model"].encode(), lib.llama_model_default_params())
        if not self.model:
            raise CannotRun(f"it does not load {job['model']}")
        params = lib.llama_context_default_params()
        params.n_ctx = -(-(job["kv_tokens"] + job["max_seqs"]) // 256) * 256
        params.n_batch = params.n_ubatch = self.budget = max(job["token_budget"], job["max_seqs"])
        params.n_seq_max = job["max_seqs"]
        params.n_threads = params.n_threads_batch = job["threads"]
        params.kv_unified = True
        if job["dtype"] == "float32":
            params.type_k = params.type_v = F32
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise CannotRun("it makes no context of this size")
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(self.budget, 0, 1)
        self.free = list(range(job["max_seqs"]))
        self.waiting: list[dict[str, Any]] = []
        self.slots: dict[int, dict[str, Any]] = {}
        self.about = {
            "version": lib.__version__,
            "model": job["model"].rsplit("/", 1)[-1],
            "kv_cache": "float32" if job["dtype"] == "float32" else "float16",
            "prefix_caching": False,
        }

    def reset(self) -> None:
        lib.llama_memory_clear(self.memory, True)

    def add(self, index: int, prompt: list[int], max_new: int) -> None:
        self.waiting.append({"index": index, "prompt": prompt, "done": 0, "next": None, "left": max_new})

    def busy(self) -> bool:
        return bool(self.waiting or self.slots)

    def step(self) -> list[tuple[int, list[int]]]:
        while self.waiting and self.free:
            self.slots[self.free.pop()] = self.waiting.pop(0)
        rows = 0
        ends: list[tuple[int, int]] = []
        for slot, request in self.slots.items():
            if request["next"] is not None:
                self._put(rows, request["next"], request["done"], slot, True)
                ends.append((slot, rows))
                request["done"] += 1
                rows += 1
        for slot, request in self.slots.items():
            prompt = request["prompt"]
            while request["done"] < len(prompt) and rows < self.budget:
                last = request["done"] == len(prompt) - 1
                self._put(rows, prompt[request["done"]], request["done"], slot, last)
                if last:
                    ends.append((slot, rows))
                request["done"] += 1
                rows += 1
        self.batch.n_tokens = rows
        status = lib.llama_decode(self.context, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: status {status}")
        return [self._commit(slot, row) for slot, row in ends]

    def _put(self, row: int, token: int, position: int, slot: int, wanted: bool) -> None:
        batch = self.batch
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = slot

    def _commit(self, slot: int, row: int) -> tuple[int, list[int]]:
        logits = lib.llama_get_logits_ith(self.context, row)
        token = int(numpy.ctypeslib.as_array(logits, shape=(self.vocabulary,)).argmax())
        request = self.slots[slot]
        request["next"] = token
        request["left"] -= 1
        if request["left"] == 0:
            lib.llama_memory_seq_rm(self.memory, slot, -1, -1)
            del self.slots[slot]
            self.free.append(slot)
        return request["index"], [token]


if __name__ == "__main__":
    serve(LlamaCpp)
