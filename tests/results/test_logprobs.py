"""Log-probabilities of what was sampled and of its alternatives: those of a plain forward, before or after `generate`'s
own processors, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VOCAB, greedy, make_model, make_prompts
from transformers import LogitsProcessorList

from hf_cb import EngineConfig
from hf_cb.options.recipe import make_recipe

PROMPTS = make_prompts([4, 21, 9, 1, 13, 30, 2])
# one a prompt: greedy, the common warpers, and what is done row by row
OPTIONS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"temperature": 0.7, "top_k": 0},
    {"top_k": 5, "temperature": 2.0},
    {"top_k": 0, "top_p": 0.6, "temperature": 3.0},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 3.0},
    {"repetition_penalty": 1.7, "top_k": 7, "temperature": 2.0},
    {"do_sample": False, "repetition_penalty": 1.7},
]
TIGHT = EngineConfig(block_size=4, max_batch_tokens=8)


def logits_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of a plain forward, `[len(tokens), V]`: what each token was chosen from."""
    with torch.no_grad():
        return model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]


def processed(model: Any, prompt: list[int], tokens: list[int], options: dict[str, Any]) -> torch.Tensor:
    """The same logits as the request's own processors of transformers make them."""
    recipe = make_recipe(model, None, {"max_new_tokens": 9} | options, tokenizer=None, default_length=20)
    process = recipe.for_prompt(prompt).process or LogitsProcessorList()
    rows = logits_of(model, prompt, tokens)
    ids = [torch.tensor([prompt + tokens[:i]]) for i in range(len(tokens))]
    return torch.cat([process(i, row[None].clone()) for i, row in zip(ids, rows, strict=True)])


def check(result: Any, scores: torch.Tensor, most: int) -> None:
    """Its log-probabilities are the log-softmax of these scores, and the alternatives the best ones."""
    want = scores.log_softmax(-1)
    own = want.gather(1, torch.tensor(result.generated_tokens)[:, None])[:, 0]
    assert result.logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert len(result.top_logprobs) == len(result.generated_tokens)
    for token, told, row in zip(result.generated_tokens, result.top_logprobs, want, strict=True):
        best = [v for v in row.topk(most).values.tolist() if v > -float("inf")]
        assert list(told.values()) == sorted(told.values(), reverse=True)
        assert list(told.values())[: len(best)] == pytest.approx(best, abs=1e-4)
        assert set(told) - {token} <= set(row.isfinite().nonzero()[:, 0].tolist())
        assert len(told) == len(best) + (token not in list(told)[: len(best)])
        for other, value in told.items():
            assert value == pytest.approx(float(row[other]), abs=1e-4)


def run(model: Any, which: list[int], config: EngineConfig, **more: Any) -> list[Any]:
    """Requests with options of their own, in one batch."""
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            handles = [
                manager.submit(
                    PROMPTS[i], seed=i, max_new_tokens=9, eos_token_id=-1, **{"do_sample": True} | OPTIONS[i] | more
                )
                for i in which
            ]
        return [h.result() for h in handles]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
@pytest.mark.parametrize("overlap", [False, True])
def test_equal_a_plain_forward(shared_llama, mode: str, overlap: bool) -> None:
    config = EngineConfig(block_size=4, max_batch_tokens=8, overlap=overlap)
    results = run(shared_llama, list(range(7)), config, logprobs=6, logprobs_mode=mode)
    for i, result in enumerate(results):
        tokens = result.generated_tokens
        if mode == "raw_logprobs":
            scores = logits_of(shared_llama, PROMPTS[i], tokens)
        else:
            scores = processed(shared_llama, PROMPTS[i], tokens, {"do_sample": True} | OPTIONS[i])
        check(result, scores, 6)


@pytest.mark.usefixtures("patched")
def test_asking_changes_no_token_and_nobody_else_is_told(shared_llama) -> None:
    plain = run(shared_llama, list(range(7)), TIGHT)
    asked = run(shared_llama, list(range(7)), TIGHT, logprobs=3, output_scores=True, output_logits=True)
    assert [r.generated_tokens for r in plain] == [r.generated_tokens for r in asked]
    assert all(not r.logprobs and r.top_logprobs is r.scores is r.logits is r.prompt_logprobs is None for r in plain)
    alone = [run(shared_llama, [i], TIGHT, logprobs=3)[0] for i in range(7)]
    for one, many in zip(alone, asked, strict=True):
        assert one.logprobs == pytest.approx(many.logprobs, abs=1e-4)
        assert [list(t) for t in one.top_logprobs] == [list(t) for t in many.top_logprobs]


@pytest.mark.usefixtures("patched")
def test_true_zero_and_a_number(shared_llama) -> None:
    prompt = PROMPTS[1]
    asked = [None, False, True, 0, 2, VOCAB]
    with shared_llama.continuous_batching_context_manager() as manager:
        got = [manager.submit(prompt, greedy(3), logprobs=k).result() for k in asked]
    assert [len(r.logprobs) for r in got] == [0, 0, 3, 3, 3, 3]
    assert [r.top_logprobs and [len(t) for t in r.top_logprobs] for r in got] == [
        None,
        None,
        None,
        [1] * 3,
        [2] * 3,
        [128] * 3,
    ]
    assert [next(iter(t)) for t in got[4].top_logprobs] == got[4].generated_tokens
    config = EngineConfig(return_logprobs=True)
    by_default, without = (
        next(iter(shared_llama.generate_batch([prompt], greedy(3), config, **o).values()))
        for o in ({}, {"logprobs": False})
    )
    assert by_default.logprobs == got[2].logprobs and without.logprobs == []


@pytest.mark.usefixtures("patched")
def test_logits_and_scores_as_in_generate(shared_llama) -> None:
    for i, options in enumerate(OPTIONS):
        (result,) = run(shared_llama, [i], TIGHT, output_scores=True, output_logits=True)
        tokens = result.generated_tokens
        assert len(result.scores) == len(result.logits) == len(tokens)
        assert torch.stack(result.logits).dtype == torch.float32
        torch.testing.assert_close(
            torch.stack(result.logits), logits_of(shared_llama, PROMPTS[i], tokens), atol=1e-4, rtol=0
        )
        want = processed(shared_llama, PROMPTS[i], tokens, {"do_sample": True} | options)
        torch.testing.assert_close(torch.stack(result.scores), want, atol=1e-3, rtol=0)


@pytest.mark.usefixtures("patched")
def test_greedy_scores_are_those_that_generate_returns(shared_llama) -> None:
    config = greedy(5, repetition_penalty=1.5, output_scores=True, output_logits=True)
    (result,) = shared_llama.generate_batch([PROMPTS[2]], config).values()
    config.return_dict_in_generate = True
    ids = torch.tensor([PROMPTS[2]])
    want = shared_llama.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert result.generated_tokens == want.sequences[0, ids.shape[1] :].tolist()
    torch.testing.assert_close(torch.stack(result.scores), torch.cat(want.scores), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.stack(result.logits), torch.cat(want.logits), atol=1e-4, rtol=0)
    (also,) = shared_llama.generate_batch([PROMPTS[2]], config).values()
    assert also.generated_tokens == result.generated_tokens, "return_dict_in_generate means nothing here"


@pytest.mark.usefixtures("patched")
def test_streamed_with_the_tokens(shared_llama) -> None:
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=TIGHT) as manager:
        handle = manager.submit(PROMPTS[1], greedy(9), logprobs=2)
        deltas = list(handle)
        silent = list(manager.submit(PROMPTS[1], greedy(2)))
    result = handle.result()
    assert sum((d.logprobs for d in deltas), []) == result.logprobs
    assert sum((d.top_logprobs for d in deltas), []) == result.top_logprobs
    assert all(len(d.token_ids) == len(d.logprobs) == len(d.top_logprobs) for d in deltas)
    assert all(d.logprobs is None and d.top_logprobs is None for d in silent)


@pytest.mark.usefixtures("patched")
def test_a_request_that_fails_tells_nothing_and_harms_nobody(shared_llama) -> None:
    def spoil(ids, scores):
        return scores * float("nan") if ids.shape[1] > 12 else scores

    with shared_llama.continuous_batching_context_manager() as manager:
        with manager.pause():
            bad = manager.submit(PROMPTS[2], greedy(9), logits_processor=[spoil], logprobs=2, output_scores=True)
            good = manager.submit(PROMPTS[1], greedy(9), logprobs=2)
        (failed,) = bad.outputs()
        check(good.result(), logits_of(shared_llama, PROMPTS[1], good.result().generated_tokens), 2)
    assert "NaN" in failed.error
    assert len(failed.generated_tokens) == len(failed.logprobs) == len(failed.top_logprobs) == len(failed.scores) == 4


@pytest.mark.usefixtures("patched")
def test_a_processor_is_asked_once_a_token() -> None:
    """It may keep count."""
    calls: list[int] = []

    def count(ids, scores):
        calls.append(ids.shape[1])
        return scores

    model = make_model()
    model.generate_batch([PROMPTS[0]], greedy(5), logits_processor=[count], logprobs=3, output_scores=True)
    assert calls == [4, 5, 6, 7, 8]
