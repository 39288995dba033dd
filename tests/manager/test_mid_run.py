"""What happens to a manager in the middle of its work: weights that change, requests that go."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
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
        handle = manager.submit([5] * 200, greedy(5))
        while manager.stats().blocks_held < 10:
            time.sleep(0.0005)
        with manager.pause():
            handle.cancel()
            steps = manager.stats().steps
        result = handle.result(10)
        other = manager.submit(PROMPTS[0], greedy(2)).result(10)
    assert (result.finish_reason, result.generated_tokens) == ("cancelled", []) and other.error is None
    held = [r.blocks_used for r in manager.trace() if r.step > steps]
    assert max(held) <= 3, "only the other's own"
