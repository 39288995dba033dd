"""What happens to a manager in the middle of its work: weights that change, requests that go."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from running import held_after
from tiny_models import generate_alone, greedy, make_model, make_prompts

from hf_cb import EngineConfig

PROMPTS = make_prompts([5, 12, 3])


def test_weights_change_in_pauses_of_several_threads(patched) -> None:
    """No step sees a change in the middle, and what comes after sees all of them."""
    model = make_model()
    weight = model.model.layers[0].self_attn.v_proj.weight
    with model.continuous_batching_context_manager(continuous_batching_config=EngineConfig(block_size=4)) as manager:
        handles = [manager.submit(p, greedy(200)) for p in PROMPTS]

        def change() -> None:
            for _ in range(5):
                with manager.pause(), torch.no_grad():
                    steps = manager.stats().steps
                    weight.data.mul_(1.1)  # leaves no trace in the parameter
                    time.sleep(0.001)
                    assert manager.stats().steps == steps

        with ThreadPoolExecutor(4) as pool:
            for job in [pool.submit(change) for _ in range(4)]:
                job.result(20)
        for handle in handles:
            handle.cancel()
        after = [manager.submit(p, greedy(8)).result(10).generated_tokens for p in PROMPTS]
    assert after == [generate_alone(model, p, greedy(8)) for p in PROMPTS]


def test_cancelling_in_the_middle_of_a_prompt(patched, shared_llama) -> None:
    """Its blocks are back one step later."""
    config = EngineConfig(block_size=4, max_batch_tokens=4)
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        may_go_on = held_after(manager.engine, 12)
        handle = manager.submit([5] * 200, greedy(5))
        while manager.stats().blocks_held < 10:
            time.sleep(0.0005)
        handle.cancel()
        steps = manager.stats().steps + 1  # one may be in flight
        may_go_on.set()
        result = handle.result(10)
        other = manager.submit(PROMPTS[0], greedy(2)).result(10)
    assert (result.finish_reason, result.generated_tokens) == ("cancelled", []) and other.error is None
    held = [r.blocks_used for r in manager.trace() if r.step > steps]
    assert max(held) <= 3, "only the other's own"


def test_one_wake_for_each_event_loop_and_step(patched, shared_llama) -> None:
    """However many streams an event loop has: crossing threads is what costs."""

    async def main() -> tuple[int, int]:
        loop, calls = asyncio.get_running_loop(), []
        across = loop.call_soon_threadsafe

        def count(*args: Any) -> Any:
            calls.append(args)
            return across(*args)

        with shared_llama.continuous_batching_context_manager() as manager:
            with manager.pause():
                handles = [manager.submit(PROMPTS[0], greedy(40)) for _ in range(20)]
            loop.call_soon_threadsafe = count  # type: ignore[method-assign]
            steps = manager.stats().steps
            await asyncio.gather(*handles)
            del loop.call_soon_threadsafe  # type: ignore[attr-defined]
            return len(calls), manager.stats().steps - steps

    wakes, steps = asyncio.run(main())
    assert 0 < wakes <= steps + 1


INTERRUPTED = """
import os, signal, sys, threading
sys.path[:0] = {path!r}
from tiny_models import greedy, make_model, make_prompts
import hf_cb
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
hf_cb.patch()
model = make_model()
prompts = make_prompts([5, 9, 20])
want = [r.generated_tokens for r in model.generate_batch(prompts, greedy(5)).values()]
with model.continuous_batching_context_manager() as manager:
    for call in (
        lambda: model.generate_batch(prompts * 20, greedy(200)),
        lambda: [None for _ in model.stream_batch(prompts * 20, greedy(200))],
        lambda: manager.submit(prompts[0], greedy(245)).result(),
    ):
        try:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            while True:
                call()
        except KeyboardInterrupt:
            pass
        assert [r.generated_tokens for r in model.generate_batch(prompts, greedy(5)).values()] == want
    assert manager.submit(prompts[0], greedy(5)).result(10).generated_tokens == want[0]
print("well")
"""


def test_real_interrupts() -> None:
    """Ctrl-C in a cell: its requests go, and the next call works."""
    code = INTERRUPTED.format(path=[str(Path(__file__).parents[1])])
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "well", done.stderr[-2000:]
