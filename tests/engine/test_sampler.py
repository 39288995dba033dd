"""Sampling: the right distribution, the same token for the same seed and place, a failure that stays in its row."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from hf_cb.core import Request, SamplingParams
from hf_cb.engine.sampler import Sampler, pick
from hf_cb.seeds import derive_seed, uniform
from hf_cb.steps import PlanPart


def sampled(logits: torch.Tensor, *requests: Request) -> list:
    parts = [PlanPart(r, 0, 1, samples=1) for r in requests]
    return [row[0] for row in Sampler().sample(logits, parts)]


def with_params(name: str = "r", **options) -> Request:
    return Request(name, [1, 2], SamplingParams(4, **options))


def test_draws_follow_the_probabilities() -> None:
    """Chi-square over 5 tokens, 20,000 draws; 18.5 is exceeded once in a thousand times, and the seed is fixed."""
    scores = torch.tensor([1.0, 0.0, -1.0, 2.0, float("-inf")])
    counts = torch.bincount(torch.tensor([pick(scores, uniform(7, i)) for i in range(20_000)]), minlength=5)
    expected = scores.softmax(-1) * 20_000
    assert counts[4] == 0
    assert float(((counts - expected)[:4] ** 2 / expected[:4]).sum()) < 18.5


def test_a_token_depends_on_seed_and_place_alone() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    alone = sampled(logits[:1], with_params(do_sample=True, seed=5))[0]
    mates = [with_params("a", do_sample=True, seed=9), with_params("b")]
    assert sampled(logits, with_params(do_sample=True, seed=5), *mates)[0] == alone
    longer = with_params(do_sample=True, seed=5)
    draws = set()
    for _ in range(40):
        longer.token_ids.append(0)
        draws.add(sampled(torch.zeros(1, 50), longer)[0].token_id)
    assert len(draws) > 20, "every place draws its own number"


def test_uniform_numbers_are_uniform() -> None:
    values = torch.tensor([uniform(s, p) for s in range(50) for p in range(50)])
    assert values.min() >= 0 and values.max() < 1
    assert values.mean() == pytest.approx(0.5, abs=0.02) and values.std() == pytest.approx(12**-0.5, abs=0.02)


def test_children_have_seeds_of_their_own() -> None:
    assert derive_seed(3, 0) == 3
    assert len({derive_seed(3, i) for i in range(100)} | {derive_seed(4, i) for i in range(100)}) == 200


def test_processors_see_their_own_ids_and_scores() -> None:
    seen = []

    def spy(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((ids.tolist(), tuple(scores.shape), scores.dtype))
        return scores.index_fill(1, torch.tensor([3]), 100.0)

    rows = sampled(torch.zeros(2, 6, dtype=torch.bfloat16), with_params("plain"), with_params("spied", process=spy))
    assert [r.token_id for r in rows] == [0, 3]
    assert seen == [([[1, 2]], (1, 6), torch.float32)]


def test_a_processor_that_raises_fails_its_own_row() -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    good, bad = sampled(torch.tensor([[0.0, 1.0]] * 2), with_params("a"), with_params("b", process=broken))
    assert good.exception is None and good.token_id == 1
    assert isinstance(bad.exception, KeyError)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}])
def test_scores_that_are_no_numbers_fail_their_own_row(options) -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, float("nan")]])
    good, bad = sampled(logits, with_params("a", **options), with_params("b", **options))
    assert good.exception is None and "NaN" in str(bad.exception)


def test_log_probabilities_are_those_of_the_processed_scores() -> None:
    logits, warper = torch.tensor([[0.0, 2.0]]), LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    plain = sampled(logits, with_params(logprobs=True))[0]
    warped = sampled(logits, with_params(logprobs=True, process=warper))[0]
    assert plain.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 1]))
    assert warped.logprob == pytest.approx(float((logits / 0.5).log_softmax(-1)[0, 1]), abs=1e-6)


def test_drafted_places_see_the_drafts_before_them() -> None:
    seen = []

    def spy(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    r = with_params(process=spy)
    Sampler().sample(torch.zeros(3, 4), [PlanPart(r, 1, 3, samples=3, drafts=[8, 9])])
    assert seen == [[1, 2], [1, 2, 8], [1, 2, 8, 9]]
