"""Invariant 3: a request's result does not depend on who else is in the batch, nor on what they do."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, generate_alone, greedy, make_model, make_prompts

from hf_cb import EngineConfig

pytestmark = pytest.mark.usefixtures("patched")


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_tokens_and_log_probabilities_beside_any_mates(family: str) -> None:
    model, prompt = make_model(family), make_prompts([13])[0]
    config = EngineConfig(return_logprobs=True, block_size=4, max_batch_tokens=16)
    options = greedy(10, do_sample=True, repetition_penalty=1.3, temperature=1.2)
    (alone,) = model.generate_batch([prompt], options, config, seed=11).values()

    def broken(*_):
        raise ZeroDivisionError

    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        mates = [manager.submit(p, greedy(40)) for p in make_prompts([1, 30, 9], seed=5)]
        mates.append(manager.submit(prompt, greedy(40, do_sample=True, temperature=3.0)))
        failing = manager.submit(prompt, greedy(), logits_processor=[broken])
        among = manager.submit(prompt, options, seed=11)
        mates[1].cancel()
        result = among.result()
        with pytest.raises(ZeroDivisionError):
            failing.result()
    assert result.generated_tokens == alone.generated_tokens
    assert result.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_poisoned_mate_leaves_no_trace_in_reused_blocks() -> None:
    """One token's embedding is NaN, so its request's keys and values are; later requests get those blocks."""
    model = make_model("Llama")
    prompts = make_prompts([13, 6])
    want = [generate_alone(model, p, greedy(20)) for p in prompts]
    poison = next(i for i in range(3, VOCAB) if i not in {t for row in prompts + want for t in row})
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    config = EngineConfig(block_size=4, num_blocks=18)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        for _ in range(3):
            bad = manager.submit([7, poison, 8] * 8, greedy())
            good = [manager.submit(p, greedy(20)) for p in prompts]
            with pytest.raises(ValueError, match="NaN"):
                bad.result()
            assert [h.result().generated_tokens for h in good] == want
    manager.engine.check_idle()
