"""The native sampler against transformers' warpers and the engine's own pick, for every variant and awkward row."""

from __future__ import annotations

import functools
import itertools
import math
from array import array

import pytest
import torch
from cpu_variants import each_variant, needs_library, table_of, workspace
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_cb.engine.sampler import pick
from hf_cb.kernels.cpu.sampler import NO_TOKEN, NOT_A_NUMBER, Draw, sample
from hf_cb.seeds import uniform

pytestmark = needs_library
INF, NAN = float("inf"), float("nan")
SETTINGS = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, k, p, m in itertools.product((1.0, 0.7, 1.9), (0, 1, 50), (1.0, 0.95, 0.3), (0.0, 0.05))
]


@pytest.fixture(autouse=True)
def stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal scores the top-p warper's sort may put any first; here it is the one with the lower index."""
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))


def warped(scores: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Scores `[V]` after `generate`'s own warpers."""
    processors = LogitsProcessorList()
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    return processors(torch.zeros(1, 1, dtype=torch.long), scores[None])[0]


def drawn(variant: str, scores: torch.Tensor, *us: float, threads: int = 1, **settings) -> list[int]:
    """One row's token for each of these uniform numbers."""
    draws = [Draw(0, u, **settings) for u in us]
    return [token for token, *_ in sample(table_of(variant), workspace(), scores[None], draws, threads)]


def kept(variant: str, scores: torch.Tensor, **settings) -> set[int]:
    """The tokens that can be drawn, if no probability is below one in 1,000."""
    return set(drawn(variant, scores, *(i / 1000 for i in range(1000)), **settings))


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Some rows flat, some steep, some of few different values."""
    torch.manual_seed(seed)
    x = torch.randn(rows, vocab) * torch.tensor([0.5, 2.0, 6.0]).repeat(rows)[:rows, None]
    x[::5] = (x[::5] * 4).round() / 4
    return x


@each_variant
def test_tokens_are_those_of_transformers_warpers(variant: str) -> None:
    equal = total = 0
    for vocab in (1, 3, 63, 64, 65, 1000, 5003):
        x = logits(7, vocab, vocab)
        for i, settings in enumerate(SETTINGS):
            us = [uniform(i, row) for row in range(len(x))]
            draws = [Draw(row, u, **settings) for row, u in enumerate(us)]
            got = sample(table_of(variant), workspace(), x, draws, 2)
            for row, (token, logprob, kept) in enumerate(got):
                scores = warped(x[row], **settings)
                want = pick(scores, us[row])
                same = token == want and kept == int(scores.isfinite().sum())
                equal, total = equal + same, total + 1
                if token == want:
                    assert logprob == pytest.approx(float(scores.log_softmax(-1)[token]), abs=2e-5)
    assert equal >= 0.999 * total, f"{total - equal} of {total} differ"


@each_variant
def test_the_filters_leave_the_same_tokens(variant: str) -> None:
    equal = total = 0
    for row in logits(6, 70, 7):
        for settings in SETTINGS:
            scores = warped(row, **settings)
            likely = {i for i, p in enumerate(scores.softmax(-1).tolist()) if p > 1.1e-3}
            want = set(scores.isfinite().nonzero()[:, 0].tolist())
            got = kept(variant, row, **settings)
            equal, total = equal + (likely <= got <= want), total + 1
    assert equal >= 0.995 * total, f"{total - equal} of {total} differ"


@each_variant
def test_draws_follow_the_probabilities(variant: str) -> None:
    """Chi-square; the fixed seeds exceed what one in a thousand would, in none of the settings."""
    row, count = logits(2, 40, 3)[1], 50_000
    for settings in ({}, {"temperature": 1.5, "top_k": 20}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.8, "min_p": 0.02}):
        tokens = drawn(variant, row, *(uniform(11, i) for i in range(count)), **settings)
        expected = warped(row, **settings).softmax(-1).double() * count
        counts = torch.bincount(torch.tensor(tokens), minlength=40)
        assert not counts[expected == 0].any()
        many = expected > 5
        freedom = int(many.sum()) - 1
        chi = float(((counts - expected)[many] ** 2 / expected[many]).sum())
        assert chi < freedom + 3.1 * math.sqrt(2 * freedom) + 6, settings


@each_variant
def test_ties_are_cut_as_transformers_cuts_them(variant: str) -> None:
    flat = torch.zeros(10)
    assert kept(variant, flat) == set(range(10))
    assert kept(variant, flat, top_k=3) == set(range(10)), "all that equal the k-th stay"
    assert kept(variant, flat, min_p=1.0) == set(range(10))
    for scores in (flat, torch.tensor([1.0, 3, 3, 2, 2, 2, 3, 0, 2, 2]), -flat):
        for top_p in (0.0, 1e-9, 0.15, 0.35, 0.55, 0.75, 0.95, 0.9):
            want = set(warped(scores, top_p=top_p).isfinite().nonzero()[:, 0].tolist())
            assert kept(variant, scores, top_p=top_p) == want, top_p
    zeros = torch.tensor([-0.0, 0.0, -1.0, 0.0])
    assert kept(variant, zeros, top_k=2) == {0, 1, 3}


@each_variant
def test_the_strictest_filters_leave_the_largest(variant: str) -> None:
    for vocab in (1, 2, 77, 4096):
        row = torch.randperm(vocab).float()
        for settings in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-12}, {"min_p": 1.0}, {"temperature": 1e-4}):
            assert set(drawn(variant, row, 0.0, 0.5, 1 - 2**-53, **settings)) == {int(row.argmax())}, settings


@each_variant
def test_scores_that_are_no_numbers(variant: str) -> None:
    for place in (0, 63, 64, 98):
        row = torch.randn(99)
        row[place] = NAN
        for settings in ({}, {"top_k": 2}, {"top_p": 0.5}, {"greedy": True}, {"greedy": True, "logprobs": True}):
            assert drawn(variant, row, 0.3, **settings) == [NOT_A_NUMBER]
    row = torch.full((99,), -INF)
    assert drawn(variant, row, 0.3, top_k=2) == [NO_TOKEN]
    row[[5, 70]] = 1.0
    for settings in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.1}):
        assert kept(variant, row, **settings) == {5, 70}, "what is excluded is never drawn"
    assert drawn(variant, row, 0.0, 1 - 2**-53) == [5, 70]
    row[3] = INF
    assert drawn(variant, row, 0.3) == [NO_TOKEN]


@each_variant
def test_greedy_takes_the_first_of_the_largest(variant: str) -> None:
    for vocab in (1, 31, 64, 500, 3001):
        x = logits(12, vocab, vocab)
        got = sample(table_of(variant), workspace(), x, [Draw(i, greedy=True, logprobs=True) for i in range(12)], 2)
        best = x.max(-1).values
        assert [token for token, *_ in got] == [int((x[i] == best[i]).nonzero()[0]) for i in range(12)]
        assert [p for _, p, _ in got] == pytest.approx((best - x.logsumexp(-1)).tolist(), abs=1e-5)


@each_variant
@pytest.mark.parametrize("kind", ["repeated", "added", "banned"])
def test_changed_scores_are_exact_and_taken_back(variant: str, kind: str) -> None:
    """A token of which the score is changed, beside one with just that score, the next higher, or the next lower."""
    torch.manual_seed(0)
    for trial in range(40):
        x, changed, factor = torch.randn(99) * 3, 17 + trial, 1.0 + trial / 7
        before = x[changed].clone()
        if kind == "repeated":
            want = x[changed] * factor if x[changed] < 0 else x[changed] / factor
            lists = {"repetition": factor, "repeated": array("i", [98, changed, 500, -1])}
            x[98] = -INF
        elif kind == "added":
            want = x[changed] + torch.tensor(factor)
            lists = {"added": array("i", [500, changed]), "amounts": array("f", [9.0, factor])}
        else:
            want = torch.tensor(-INF)
            lists = {"banned": array("i", [changed, changed, 99])}
        x[x >= want] = -60.0
        x[[3, 97]] = -70.0
        near = (want, want.nextafter(torch.tensor(INF)), want.nextafter(torch.tensor(-INF)))
        for place, other in itertools.product((3, 97), near):
            row = x.clone()
            row[changed] = before
            row[place] = other
            after = row.clone()
            after[changed] = want
            assert drawn(variant, row, 0.5, greedy=True, **lists) == [int(after.argmax())]
            assert row[changed] == before
            assert drawn(variant, row, 0.5, **lists) == drawn(variant, after, 0.5)


@each_variant
def test_a_row_does_not_depend_on_the_rows_beside_it_or_on_the_threads(variant: str) -> None:
    x, table, scratch = logits(len(SETTINGS), 3001), table_of(variant), workspace()
    draws = [Draw(row, uniform(1, row), **settings) for row, settings in enumerate(SETTINGS)]
    want = sample(table, scratch, x, draws, 1)
    for threads in (1, 2, 3):
        assert sample(table, scratch, x, draws, threads) == want
        assert sample(table, scratch, x, draws[::-1], threads) == want[::-1]
    alone = [sample(table, workspace(), x[d.row : d.row + 1], [d._replace(row=0)], 2)[0] for d in draws]
    assert alone == want
    wide = torch.zeros(len(x), 4000)
    wide[:, 10:3011] = x
    assert sample(table, scratch, wide[:, 10:3011], draws, 2) == want, "rows with a stride"
    assert sample(table, scratch, x.t().contiguous().t(), draws, 2) == want


def test_no_rows_and_wrong_ones() -> None:
    table, scratch = table_of("portable"), workspace()
    assert sample(table, scratch, torch.zeros(0, 5), [], 2) == []
    with pytest.raises(IndexError):
        sample(table, scratch, torch.zeros(2, 5), [Draw(2)], 1)
    with pytest.raises(ValueError, match="1 tokens.*0 amounts"):
        sample(table, scratch, torch.zeros(1, 5), [Draw(0, added=array("i", [1]))], 1)
    with pytest.raises(ValueError, match="float32"):
        sample(table, scratch, torch.zeros(2, 5, dtype=torch.bfloat16), [Draw(0)], 1)
