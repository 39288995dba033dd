"""Invariant 1: float32, the same tokens as `model.generate` one by one, for any batch, chunking and page size."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, generate_alone, greedy, make_model, make_prompts

import hf_cb
from hf_cb import EngineConfig

LENGTHS = [1, 3, 7, 8, 9, 17, 24, 40]  # around the window (8) and around the pages


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_generate(family: str) -> None:
    model, prompts = make_model(family), make_prompts(LENGTHS)
    want = [generate_alone(model, p, greedy()) for p in prompts]
    for block_size, budget in ((4, 16), (1, 5), (64, 64)):
        config = EngineConfig(block_size=block_size, max_batch_tokens=budget)
        got = model.generate_batch(prompts, greedy(), config)
        assert [r.error for r in got.values()] == [None] * len(prompts)
        assert [r.generated_tokens for r in got.values()] == want, f"blocks of {block_size}, {budget} tokens a step"


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_any_attention_implementation(implementation: str) -> None:
    model, prompts = make_model("Gemma3"), make_prompts([5, 20])
    model.set_attn_implementation(implementation)
    want = [generate_alone(model, p, greedy()) for p in prompts]
    assert [r.generated_tokens for r in model.generate_batch(prompts, greedy()).values()] == want
    assert model.config._attn_implementation == implementation


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Mistral"])
def test_with_so_few_blocks_that_requests_are_preempted(family: str) -> None:
    model, prompts = make_model(family), make_prompts([20, 19, 18, 17, 16, 15])
    want = [generate_alone(model, p, greedy(30)) for p in prompts]
    engine_config = EngineConfig(block_size=4, num_blocks=60 if family == "Gemma3" else 15, max_batch_tokens=24)
    with model.continuous_batching_context_manager(continuous_batching_config=engine_config) as manager:
        with manager.pause():  # so that all are there at once
            handles = [manager.submit(p, greedy(30)) for p in prompts]
        got = [h.result() for h in handles]
    assert [r.generated_tokens for r in got] == want
    assert sum(r.metrics.preemptions for r in got) > 0, "the cache was meant to be too small"
    manager.engine.check_idle()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Mistral"])
def test_prefix_hits_change_nothing(family: str) -> None:
    model = make_model(family)
    start = make_prompts([33])[0]
    prompts = [start + end for end in make_prompts([1, 2, 9, 5], seed=2)] + [start, start[:32], start[:31]]
    want = [generate_alone(model, p, greedy()) for p in prompts]
    with model.continuous_batching_context_manager(continuous_batching_config=EngineConfig(block_size=4)) as manager:
        got = [manager.submit(p, greedy()).result() for p in prompts for _ in (1, 2)]
    assert [r.generated_tokens for r in got] == [w for w in want for _ in (1, 2)]
    assert [r.metrics.cached_tokens > 0 for r in got] == [False] + [True] * (len(got) - 1)


@pytest.mark.usefixtures("patched")
def test_log_probabilities_equal_a_plain_forward(shared_llama) -> None:
    prompts = make_prompts([4, 21])
    config = EngineConfig(return_logprobs=True, block_size=4, max_batch_tokens=8)
    for prompt, result in zip(prompts, shared_llama.generate_batch(prompts, greedy(), config).values(), strict=True):
        with torch.no_grad():
            logits = shared_llama(torch.tensor([prompt + result.generated_tokens])).logits[0]
        at = torch.arange(len(prompt) - 1, len(prompt) + 11)
        want = logits.log_softmax(-1)[at, torch.tensor(result.generated_tokens)]
        assert result.logprobs == pytest.approx(want.tolist(), abs=1e-4)


@pytest.mark.usefixtures("patched")
def test_several_sequences_share_their_prompt(shared_llama) -> None:
    prompt = make_prompts([21])[0]
    config = EngineConfig(block_size=4)
    sampled = greedy(do_sample=True, top_k=1, num_return_sequences=3)  # greedy search knows only one sequence
    results = shared_llama.generate_batch([prompt], sampled, config)
    want = generate_alone(shared_llama, prompt, greedy())
    assert list(results) == ["req_0", "req_0__child#0", "req_0__child#1"]
    assert [r.generated_tokens for r in results.values()] == [want] * 3
    # the partly filled block is shared too: 20 of 21 tokens, not 20 rounded down to whole blocks of the prefix cache
    assert [r.metrics.cached_tokens for r in results.values()] == [0, 20, 20]


@pytest.mark.usefixtures("patched")
def test_a_window_longer_than_any_request_is_full_attention() -> None:
    model = make_model("Mistral", sliding_window=4096)
    assert hf_cb.explain(model).layers == ["4 with full attention: 4 heads, 2 KV heads of 16, float32 on cpu"]
