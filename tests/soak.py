"""Everything at once, for long: `make soak`.

usage: python tests/soak.py [--requests 10000] [--seed 0] [--threads 32] [--loops 4]

Requests come from many threads and event loops. Some are cancelled, dropped, late, poison for the forward, or bring a
processor that raises; now and then somebody pauses the manager. At the end every request has ended exactly once with
the tokens that `generate` gives (or with its own error), every block is back, no thread is left, and memory has not
grown since a tenth of the way.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import sys
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch
from tiny_models import VOCAB, generate_alone, greedy, make_model, make_prompts

import hf_cb
from hf_cb import EngineConfig
from hf_cb.errors import PromptError, QueueFullError

POISON = VOCAB - 1
GROWTH = 1.05  # of the memory, after a tenth of the requests


class Soak:
    """One manager under fire, and what came of each request."""

    def __init__(self, requests: int, seed: int) -> None:
        self.left, self.seed = requests, seed
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()
        self.model = make_model()
        torch.nn.init.zeros_(self.model.lm_head.weight[POISON])  # so that nobody generates it
        prompts = make_prompts([random.Random(seed + i).randint(1, 60) for i in range(40)], seed)
        self.prompts = [[t % POISON for t in p] for p in prompts]
        self.want = [generate_alone(self.model, p, greedy(24)) for p in self.prompts]
        self.model.model.embed_tokens.register_forward_pre_hook(self._poison)
        config = EngineConfig(block_size=4, num_blocks=160, max_num_seqs=24, max_batch_tokens=64, max_queue_size=200)
        self.manager = self.model.init_continuous_batching(continuous_batching_config=config)

    def _poison(self, _: Any, args: tuple[Any, ...]) -> None:
        if (args[0] == POISON).any():
            raise ValueError("poison")

    def take(self) -> bool:
        with self.lock:
            self.left -= 1
            return self.left >= 0

    def note(self, outcome: str) -> None:
        with self.lock:
            self.outcomes[outcome] += 1

    # ------------------------------------------------------------------------------------------------ one request

    def submit(self, chance: random.Random) -> tuple[str, int, int, Any]:
        """A request of a random kind: the kind, the prompt's number, how many tokens, and the handle."""
        kind = chance.choices(
            ("plain", "cancel", "drop", "poison", "raises", "late", "several", "stop", "refused"),
            (50, 10, 8, 3, 3, 4, 6, 8, 2),
        )[0]
        number, count = chance.randrange(len(self.prompts)), chance.randint(1, 24)
        prompt, options = list(self.prompts[number]), {}
        if kind == "poison":
            prompt.insert(chance.randrange(len(prompt) + 1), POISON)
        elif kind == "raises":
            options["logits_processor"] = [lambda ids, scores: 1 / 0 if ids.shape[1] > len(prompt) else scores]
        elif kind == "late":
            options["deadline"] = chance.uniform(1e-4, 0.05)
        elif kind == "several":
            options |= {"num_return_sequences": 3, "do_sample": True, "top_k": 1}
        elif kind == "stop":
            options["stopping_criteria"] = [lambda ids, _: torch.tensor([ids.shape[1] >= len(prompt) + 3])]
        elif kind == "refused":
            prompt = chance.choice([[], [VOCAB], [1] * 10_000])
        handle = self.manager.submit(prompt, greedy(count), queue_wait=60, **options)
        return kind, number, count, handle

    def check(self, kind: str, number: int, count: int, handle: Any) -> None:
        """After the end: the right one for its kind."""
        if not handle.done:
            self.wrong.append(f"{kind}: not done")
            return
        for output in handle.outputs(0):
            want, got, reason = self.want[number][:count], output.generated_tokens, output.finish_reason
            self.note(f"{kind}: {reason}")
            if kind in ("plain", "several"):
                right = got == want and reason == "length"
            elif kind == "poison":
                right = reason == "error" and "poison" in output.error
            elif kind == "raises":
                right = (reason == "error" and got == want[:1]) if count > 1 else reason == "length"
            elif kind == "stop":
                right = got == want[:3]
            else:
                right = got == want[: len(got)] and reason in ("length", "cancelled", "timeout")
            if not right:
                self.wrong.append(f"{kind}: {reason} {output.error} {got} instead of {want}")

    def in_thread(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        while self.take():
            if chance.random() < 0.01:
                with self.manager.pause():
                    time.sleep(chance.uniform(0, 0.01))
            try:
                kind, which, count, handle = self.submit(chance)
            except (PromptError, QueueFullError) as error:
                self.note(f"not accepted: {type(error).__name__}")
                continue
            if kind == "drop":
                if chance.random() < 0.5:
                    next(iter(handle))
                self.note("drop")
                del handle
                continue
            if kind == "cancel":
                if chance.random() < 0.5:
                    next(iter(handle))
                handle.cancel()
            if chance.random() < 0.3:
                try:
                    tokens = [t for delta in handle for t in delta.token_ids if delta.request_id == handle.request_id]
                except (ValueError, ZeroDivisionError):
                    tokens = None
                if tokens is not None and tokens != handle.outputs(0)[0].generated_tokens:
                    self.wrong.append(f"{kind}: streamed {tokens}")
            elif not handle.wait(120):
                self.wrong.append(f"{kind}: hangs")
            self.check(kind, which, count, handle)

    async def in_loop(self, number: int) -> None:
        async def one(worker: int) -> None:
            chance = random.Random(self.seed * 1000 + 100 * number + worker)
            while self.take():
                try:
                    kind, which, count, handle = await asyncio.to_thread(self.submit, chance)
                except (PromptError, QueueFullError) as error:
                    self.note(f"not accepted: {type(error).__name__}")
                    continue
                if kind == "drop":
                    async for _ in handle:
                        break
                    self.note("drop")
                    del handle
                    continue
                if kind == "cancel":
                    handle.cancel()
                try:
                    if chance.random() < 0.5:
                        await handle
                    else:
                        async for _ in handle:
                            pass
                except (ValueError, ZeroDivisionError):
                    pass
                self.check(kind, which, count, handle)

        await asyncio.gather(*(one(worker) for worker in range(8)))

    # ------------------------------------------------------------------------------------------------ all of them

    def run(self, threads: int, loops: int) -> list[str]:
        """What went wrong."""
        total, before, memory = self.left, set(threading.enumerate()), 0
        self.manager.start()
        with ThreadPoolExecutor(threads + loops) as pool:
            jobs = [pool.submit(self.in_thread, i) for i in range(threads)]
            jobs += [pool.submit(asyncio.run, self.in_loop(i)) for i in range(loops)]
            while not all(job.done() for job in jobs):
                time.sleep(0.05)
                if not memory and self.left < 0.9 * total:
                    memory = _memory()
            for job in jobs:
                job.result()
        growth = _memory() / memory if memory else 1.0
        end = time.monotonic() + 30
        while len(self.manager.registry) and time.monotonic() < end:  # the dropped ones
            time.sleep(0.01)
        steps, died = self.manager.engine.num_steps, self.manager.loop.fatal_error
        self.manager.stop()
        problems = self.wrong[:20]
        problems += [f"the loop died: {died!r}"] if died else []
        problems += [f"{len(self.manager.registry)} requests never ended"] if len(self.manager.registry) else []
        problems += [f"memory grew {growth:.3f} times"] if growth > GROWTH else []
        try:
            self.manager.engine.check_idle()
        except AssertionError as error:
            problems.append(f"not idle: {error}")
        if more := set(threading.enumerate()) - before:
            problems.append(f"threads are left: {more}")
        print(f"{total} requests, {steps} steps; memory {growth:.3f} times; {dict(sorted(self.outcomes.items()))}")
        return problems


def _memory() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def main() -> int:
    """Exit code 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--loops", type=int, default=4)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    began = time.monotonic()
    hf_cb.patch()
    try:
        problems = Soak(args.requests, args.seed).run(args.threads, args.loops)
    finally:
        hf_cb.unpatch()
    print(f"{time.monotonic() - began:.0f} s;", "\n".join(problems) or "all is well")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
