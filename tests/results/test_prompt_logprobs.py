"""Log-probabilities of prompts: a plain forward's, however the prompt is cut, shared, interrupted or repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import generate_alone, greedy, make_model, make_prompts

import hf_cb
from hf_cb import EngineConfig, OptionError
from hf_cb.engine import logprobs, scheduler

PROMPTS = make_prompts([1, 2, 8, 9, 17, 33])


def check(model: Any, prompt: list[int], told: Any, most: int = 0) -> None:
    assert told[0] is None and len(told) == len(prompt)
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for i, found in enumerate(told[1:]):
        best = want[i].topk(most)
        expected = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        expected.setdefault(prompt[i + 1], float(want[i, prompt[i + 1]]))
        assert list(found) == list(expected) and found == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_equal_a_plain_forward_in_any_chunks(family: str, chunk: int, overlap: bool) -> None:
    """In one batch with requests that ask for nothing, whose tokens stay what they are."""
    model = make_model(family)
    config = EngineConfig(block_size=4, max_batch_tokens=24, prefill_chunk=chunk, overlap=overlap)
    want = [generate_alone(model, p, greedy(4)) for p in PROMPTS]
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            asked = [
                manager.submit(p, greedy(4), prompt_logprobs=i % 3, logprobs=i % 2 == 0) for i, p in enumerate(PROMPTS)
            ]
            others = [manager.submit(p, greedy(4)) for p in PROMPTS]
        results = [h.result() for h in asked]
        for i, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
            check(model, prompt, result.prompt_logprobs, i % 3)
        assert [r.generated_tokens for r in results] == [h.result().generated_tokens for h in others] == want
        assert all(h.result().prompt_logprobs is None for h in others)
    manager.engine.check_idle()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_generated_with_max_new_tokens_0(shared_llama, overlap: bool) -> None:
    config = EngineConfig(block_size=4, max_batch_tokens=7, overlap=overlap)
    results = shared_llama.generate_batch(PROMPTS, None, config, max_new_tokens=0, prompt_logprobs=True)
    for prompt, result in zip(PROMPTS, results.values(), strict=True):
        check(shared_llama, prompt, result.prompt_logprobs)
        assert (result.generated_tokens, result.finish_reason, result.error) == ([], "length", None)
    (delta,) = shared_llama.stream_batch([PROMPTS[3]], None, config, max_new_tokens=0, prompt_logprobs=True)
    assert (delta.token_ids, delta.finish_reason) == ([], "length")


@pytest.mark.usefixtures("patched")
def test_a_cached_beginning_is_computed_again_for_who_asks(shared_llama) -> None:
    prompt = PROMPTS[5]
    with shared_llama.continuous_batching_context_manager(
        continuous_batching_config=EngineConfig(block_size=4)
    ) as manager:
        first, asks, after = (
            manager.submit(prompt, greedy(6), **options).result() for options in ({}, {"prompt_logprobs": 2}, {})
        )
    check(shared_llama, prompt, asks.prompt_logprobs, 2)
    assert first.generated_tokens == asks.generated_tokens == after.generated_tokens
    assert (asks.metrics.cached_tokens, after.metrics.cached_tokens) == (0, 32)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_give_way_report_once(shared_llama, overlap: bool) -> None:
    """Also in the middle of their prompts: chunks are small, and a cache this tiny is full before they end."""
    prompts = make_prompts([20, 19, 18, 17, 16, 15])
    config = EngineConfig(block_size=4, num_blocks=15, max_batch_tokens=24, prefill_chunk=5, overlap=overlap)
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            handles = [manager.submit(p, greedy(30), prompt_logprobs=1, logprobs=1) for p in prompts]
        results = [h.result() for h in handles]
    assert sum(r.metrics.preemptions for r in results) > 0
    for prompt, result in zip(prompts, results, strict=True):
        check(shared_llama, prompt, result.prompt_logprobs, 1)
        assert result.generated_tokens == generate_alone(shared_llama, prompt, greedy(30))
        assert len(result.logprobs) == len(result.top_logprobs) == 30
    manager.engine.check_idle()


@pytest.mark.usefixtures("patched")
def test_a_step_scores_few_rows_and_others_go_on(shared_llama, monkeypatch) -> None:
    monkeypatch.setattr(scheduler, "SCORED_ROWS", 6)
    monkeypatch.setattr(logprobs, "SLICE", 2)
    seen: list[int] = []
    split = logprobs.split

    def watch(logits, parts):
        seen.append(sum(p.prompt_rows for p in parts))
        return split(logits, parts)

    monkeypatch.setattr(hf_cb.engine.engine, "split", watch)
    with shared_llama.continuous_batching_context_manager() as manager:
        with manager.pause():
            asked = [manager.submit(p, greedy(2), prompt_logprobs=1) for p in PROMPTS]
            other = manager.submit(PROMPTS[5], greedy(2))
        for prompt, handle in zip(PROMPTS, asked, strict=True):
            check(shared_llama, prompt, handle.result().prompt_logprobs, 1)
        assert other.result().generated_tokens == asked[5].result().generated_tokens
    assert max(seen) == 6 and sum(seen) == sum(len(p) - 1 for p in PROMPTS)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("fails", [False, True])
def test_sequences_of_one_prompt_share_them(shared_llama, fails: bool) -> None:
    """Also where the first of them ends with an error before it has a token."""
    calls = iter(range(100))

    def fail_first(ids, scores):
        if fails and next(calls) == 0:
            raise RuntimeError("mine")
        return scores

    options = greedy(3, do_sample=True, top_k=1, num_return_sequences=3)
    config = EngineConfig(block_size=4, max_batch_tokens=8)
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        handle = manager.submit(PROMPTS[4], options, prompt_logprobs=1, logits_processor=[fail_first])
        outputs = handle.outputs()
    assert [o.error is not None for o in outputs] == [fails, False, False]
    for output in outputs:
        check(shared_llama, PROMPTS[4], output.prompt_logprobs, 1)


def test_int8_keys_and_packed_kernels() -> None:
    """What the path itself computes, to int8's accuracy, and to float32's without it."""
    model = make_model()
    prompt = PROMPTS[5]
    for kv_dtype, tolerance in ((None, 1e-4), ("int8", 0.3)):
        hf_cb.accelerate(model, kv_dtype=kv_dtype)
        (result,) = model.generate_batch([prompt], greedy(5), prompt_logprobs=3, logprobs=3).values()
        hf_cb.restore(model)
        with torch.no_grad():
            want = model(torch.tensor([prompt + result.generated_tokens])).logits[0].log_softmax(-1)
        every = result.prompt_logprobs[1:] + result.top_logprobs
        tokens = (prompt + result.generated_tokens)[1:]
        for row, token, told in zip(want, tokens, every, strict=False):
            assert told[token] == pytest.approx(float(row[token]), abs=tolerance)
            assert max(told.values()) == pytest.approx(float(row.max()), abs=tolerance)


@pytest.mark.usefixtures("patched")
def test_refused_where_only_last_rows_are_computed(shared_llama, monkeypatch) -> None:
    monkeypatch.setattr(hf_cb.manager.probe, "PATHS", ("dense",))
    model = make_model()
    with model.continuous_batching_context_manager() as manager:
        with pytest.raises(OptionError, match="prompt_logprobs"):
            manager.submit(PROMPTS[1], greedy(2), prompt_logprobs=1)
        result = manager.submit(PROMPTS[1], greedy(2), logprobs=1, output_logits=True).result()
    assert len(result.top_logprobs) == len(result.logits) == 2
