"""What readers cost: detokenising threads and asyncio streams beside the engine, against silent waiting.

usage: python -m hf_cb.bench.readers [--threads 64] [--streams 200] [--tokens 64] [--repeat 3] [--switch-interval 1e-4]

The same requests run with nobody reading (their handles are waited for), with a reader for each, which makes text of
every token as it comes, and silently beside one thread that only counts. Each round runs all three, in turn; a ratio of
1 means that readers cost nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hf_cb.config import EngineConfig
from hf_cb.demo import demo_model
from hf_cb.patching import accelerate, restore

PROMPT = "Tell me about the sea."


def silent(manager: Any, count: int, options: dict[str, Any]) -> int:
    """Tokens of `count` requests that nobody reads."""
    handles = [manager.submit(PROMPT, **options) for _ in range(count)]
    return sum(len(handle.result().generated_tokens) for handle in handles)


def read(manager: Any, threads: int, streams: int, options: dict[str, Any]) -> int:
    """The same, with a thread for each of the first ones and a stream of one event loop for each of the others."""
    handles = [manager.submit(PROMPT, **options) for _ in range(threads + streams)]

    def in_thread(handle: Any) -> int:
        return sum(len(delta.token_ids) for delta in handle)

    async def in_loop() -> int:
        async def one(handle: Any) -> int:
            return sum([len(delta.token_ids) async for delta in handle])

        return sum(await asyncio.gather(*map(one, handles[threads:])))

    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(in_thread, handle) for handle in handles[:threads]]
        found: list[int] = []
        loop = threading.Thread(target=lambda: found.append(asyncio.run(in_loop())))
        loop.start()
        tokens = sum(job.result() for job in jobs)
        loop.join()
    return tokens + sum(found)


def beside_a_busy_thread(manager: Any, count: int, options: dict[str, Any]) -> int:
    """`silent`, while a thread of pure Python wants the interpreter's lock all the time."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        return silent(manager, count, options)
    finally:
        stop.set()
        thread.join()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--switch-interval", type=float, default=1e-4, help="seconds; 0: leave Python's own")
    args = parser.parse_args(argv)
    model, tokenizer = demo_model()
    count = args.threads + args.streams
    options = {"max_new_tokens": args.tokens, "eos_token_id": -1, "do_sample": False}
    accelerate(model, tokenizer)
    config = EngineConfig(max_num_seqs=count, switch_interval=args.switch_interval or None)
    ratios: dict[str, list[float]] = {"read": [], "beside a busy thread": []}
    try:
        with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
            silent(manager, 8, options)
            for _ in range(args.repeat):
                base = _speed(silent, manager, count, options)
                speeds = {
                    "read": _speed(read, manager, args.threads, args.streams, options),
                    "beside a busy thread": _speed(beside_a_busy_thread, manager, count, options),
                }
                print(f"silent {base:.0f} tok/s; {', '.join(f'{k} {v:.0f}' for k, v in speeds.items())}", flush=True)
                for name, speed in speeds.items():
                    ratios[name].append(speed / base)
    finally:
        restore(model)
    for name, found in ratios.items():
        print(f"{name}: {statistics.median(found):.2f} of the silent throughput")
    return 0


def _speed(run: Callable[..., int], *args: Any) -> float:
    began = time.perf_counter()
    return run(*args) / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
