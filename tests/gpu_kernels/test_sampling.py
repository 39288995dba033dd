"""The sampler against transformers' warpers in float64: which tokens they leave, how likely each is, which is drawn.

A draw is the token that wins a race of score - log(E); with the E that the kernel takes, known from a kernel of this
file, the winner among what the warpers leave is known too. The log-probability shows the mass of what was left.
"""

from __future__ import annotations

import functools
import itertools
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

pytest.importorskip("triton")

import triton
import triton.language as tl

from hf_cb.kernels.triton import sampling
from hf_cb.kernels.triton.sampling import NO_TOKEN, NOT_A_NUMBER, argmax, exponential, sample

INF, NAN = float("inf"), float("nan")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities that are meant
SETTINGS = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, k, p, m in itertools.product((1.0, 0.7), (0, 1, 12), (1.0, 0.95, 0.3), (0.0, 0.05))
]
SIZES = {
    "whole": {},
    "tiles": dict(BLOCK=16, DEPTH=8),
    "no list": dict(BLOCK=16, DEPTH=0),
    "short list": dict(BLOCK=16, DEPTH=2),
}


@pytest.fixture(autouse=True)
def stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal scores the top-p warper's sort may put any first; here it is the one with the lower index."""
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))


@pytest.fixture(params=SIZES)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One tile a row, as a small vocabulary has it; several; with and without lists of candidates."""
    usual = sampling.config_for
    monkeypatch.setattr(sampling, "config_for", lambda vocab: usual(vocab) | SIZES[request.param])
    return request.param


@triton.jit
def noise_kernel(out, seed, position, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    position = tl.zeros([], tl.int64) + position
    tl.store(out + token, exponential(tl.zeros([], tl.int64) + seed, position, token, tile, LISTED, BLOCK))


def noise(size: int, seed: int, position: int, device: torch.device, listed: bool = False, block: int = 64) -> Tensor:
    out = torch.empty(triton.cdiv(size, block) * block, device=device)
    noise_kernel[(triton.cdiv(size, block),)](out, seed, position, listed, block)
    return out[:size]


def drawn(logits: Tensor, settings: list[dict[str, Any]] | dict[str, Any], seed=7, position=0) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities of rows `[R, V]`; seed and position are one for all or one for each."""
    rows = len(logits)
    settings = [settings] * rows if isinstance(settings, dict) else settings
    usual = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    dtypes = dict(temperature=torch.float32, top_k=torch.int32, top_p=torch.float32, min_p=torch.float32)
    given = {
        name: torch.tensor([(usual | s)[name] for s in settings], dtype=dtype, device=logits.device)
        for name, dtype in dtypes.items()
    }
    for name, value in (("seeds", seed), ("positions", position)):
        given[name] = torch.as_tensor(value, device=logits.device).expand(rows).contiguous()
    logprobs = torch.empty(rows, device=logits.device)
    return sample(logits, **given, logprobs_out=logprobs), logprobs


def warped(scores: Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Tensor:
    """Scores `[V]` after `generate`'s own warpers, in float32 as there, and then as float64."""
    processors = LogitsProcessorList()
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    return processors(torch.zeros(1, 1, dtype=torch.long), scores[None])[0].double()


def logits(rows: int, vocab: int, seed: int, device: torch.device) -> Tensor:
    """Some rows flat, some steep, some of few different values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=generator) * torch.tensor([0.5, 2.0, 6.0]).repeat(rows)[:rows, None]
    x[::4] = (x[::4] * 4).round() / 4
    return x.to(device)


def check(x: Tensor, settings: list[dict[str, Any]] | dict[str, Any], seed: int = 3, position: int = 11) -> None:
    """Each row's token and log-probability are those of the race among what generate's warpers leave."""
    tokens, logprobs = drawn(x, settings, seed, position)
    race = noise(x.shape[1], seed, position, x.device).double().log().cpu()
    settings = [settings] * len(x) if isinstance(settings, dict) else settings
    for row, options, token, logprob in zip(x.cpu(), settings, tokens.tolist(), logprobs.tolist(), strict=True):
        scores = warped(row, **options)
        assert token == int((scores - race).argmax()), (row, options)
        assert logprob == pytest.approx(float(scores.log_softmax(-1)[token]), abs=2e-5), (row, options)


def test_the_token_is_the_winner_among_what_generates_warpers_leave(sizes, device) -> None:
    for vocab, settings in ((3, SETTINGS[::3]), (45, SETTINGS)):
        check(logits(len(settings), vocab, vocab, device), settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, device) -> None:
    x = logits(6, 200, 0, device).to(dtype)
    for got, want in zip(drawn(x, SETTINGS[24:30]), drawn(x.float(), SETTINGS[24:30]), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(argmax(x), argmax(x.float()))


def test_draws_follow_the_probabilities(device) -> None:
    """Chi-square; the fixed seeds exceed what one in a thousand would, in none of the settings."""
    row, many = logits(2, 9, 3, device)[1], device.type == "cuda"
    for settings, count in (({"temperature": 1.5}, 200), ({"top_k": 7, "top_p": 0.9, "min_p": 0.02}, 60)):
        count = 20_000 if many else count
        places = torch.arange(count, device=device)
        tokens, _ = drawn(row.expand(count, 9).contiguous(), settings, seed=places // 20, position=places % 20)
        expected = warped(row.cpu(), **settings).softmax(-1) * count
        counts = torch.bincount(tokens.cpu(), minlength=9)
        assert not counts[expected == 0].any()
        usual = expected > 5
        freedom = int(usual.sum()) - 1
        chi = float(((counts - expected)[usual] ** 2 / expected[usual]).sum())
        assert chi < freedom + 3.1 * math.sqrt(2 * freedom) + 6, settings


def test_the_noise_is_exponential_and_independent(device) -> None:
    """Kolmogorov and Smirnov's distance, and correlations between neighbours, seeds and positions."""
    size, far = 16384, 2**40
    keys = [(0, 0), (0, 1), (1, 0), (-1, 0), (2**62, 5), (5, far), (5, far + 2**32), (5, 5)]
    noises = torch.stack([noise(size, *key, device, block=4096) for key in keys]).double().cpu()
    assert (noises > 0).all() and noises.isfinite().all()
    ideal = (torch.arange(size) + 0.5) / size
    for sorted_, key in zip(noises.sort(-1).values, keys, strict=True):
        assert (1 - torch.exp(-sorted_) - ideal).abs().max() < 1.95 / math.sqrt(size), key
    scaled = noises - noises.mean(-1, keepdim=True)
    shifted = torch.cat([scaled] + [scaled.roll(i, -1) for i in range(1, 5)])
    correlation = (scaled @ shifted.T) / size
    correlation[torch.arange(len(keys)), torch.arange(len(keys))] = 0
    assert correlation.abs().max() < 4.5 / math.sqrt(size)


def test_the_noise_of_a_token_does_not_depend_on_how_it_is_computed(device) -> None:
    want = noise(1000, 9, 2**33, device)
    for listed, block in ((False, 16), (True, 16), (True, 1024), (False, 1024)):
        assert torch.equal(noise(1000, 9, 2**33, device, listed, block), want)


def test_ties_are_cut_as_transformers_cuts_them(sizes, device) -> None:
    """Which of them stay, by their number (in the log-probability) and by who wins."""
    flat = torch.zeros(10, device=device)
    several = torch.tensor([1.0, 3, 3, 2, 2, 2, 3, 0, 2, 2], device=device)
    zeros = torch.tensor([-0.0, 0.0, -1.0, 0.0, -1, -1, -1, -1, -1, -1], device=device)
    cases = [(flat, {"top_k": 3}), (flat, {"min_p": 1.0}), (zeros, {"top_k": 2}), (several, {"top_k": 4, "top_p": 0.9})]
    cases += [(x, {"top_p": p}) for x in (flat, several) for p in (0.0, 1e-9, 0.35, 0.55, 0.75, 0.9)]
    for seed in range(2):
        check(torch.stack([x for x, _ in cases]), [settings for _, settings in cases], seed)


def test_the_strictest_filters_leave_the_largest(sizes, device) -> None:
    strict = [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-12}, {"min_p": 1.0}, {"temperature": 1e-4}]
    for vocab in (1, 2, 50):
        row = torch.randperm(vocab, device=device).float()
        tokens, logprobs = drawn(row.expand(5, -1).contiguous(), strict, seed=torch.arange(5, device=device))
        assert tokens.tolist() == [int(row.argmax())] * 5
        assert logprobs.abs().max() < 1e-6


def test_scores_that_are_no_numbers(sizes, device) -> None:
    settings = [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}]
    for place in (0, 15, 39):
        x = torch.randn(5, 40, device=device)
        x[:, place] = NAN
        assert drawn(x, settings)[0].tolist() == [NOT_A_NUMBER] * 5
        assert argmax(x).tolist() == [NOT_A_NUMBER] * 5
    x = torch.full((5, 40), -INF, device=device)
    assert drawn(x, settings)[0].tolist() == [NO_TOKEN] * 4 + [0]
    x[:, [5, 30]] = 1.0
    check(x[:4], [{}, {"top_k": 12}, {"top_p": 0.99}, {"min_p": 0.1}])
    x[:, 3] = INF
    assert drawn(x, settings)[0].tolist() == [NO_TOKEN] * 4 + [3]


def test_extreme_scores(sizes, device) -> None:
    """Far apart, near the ends of float32, and neighbours that temperature makes equal."""
    far = torch.tensor([[3e38, -3e38, 1e-40, -1e-40, 0.0, 2e38], [5e4, 49999.0, -5e4, 4.9e4, 0.0, 5e4]], device=device)
    check(far.repeat(3, 1), [{}, {}, {"top_k": 2}, {"top_k": 2}, {"top_p": 0.6, "min_p": 0.1}, {"top_p": 0.6}])
    check(torch.arange(6.0, device=device)[None].repeat(2, 1), {"temperature": 3e38, "top_p": 0.5})
    near = torch.tensor([1.99 + i * 2.0**-23 for i in range(8)], device=device)
    scores = near / 3.9
    assert len(near.unique()) == 8 and len(scores.unique()) < 8
    _, logprobs = drawn(near.expand(6, -1).contiguous(), [{"temperature": 3.9, "top_k": k} for k in range(1, 7)])
    want = [int((scores >= scores.sort().values[-k]).sum()) for k in range(1, 7)]
    assert (-logprobs).exp().round().tolist() == want != list(range(1, 7))


def test_greedy_takes_the_first_of_the_largest(sizes, device) -> None:
    for vocab in (1, 31, 70):
        x = logits(8, vocab, vocab, device).bfloat16()
        best = x.float().max(-1).values
        want = [int((row == m).nonzero()[0]) for row, m in zip(x.float(), best, strict=True)]
        tokens, logprobs = drawn(x, {"temperature": 0.0, "top_k": 3, "top_p": 0.1})
        assert tokens.tolist() == want
        assert argmax(x).tolist() == want
        assert logprobs.tolist() == pytest.approx((best - x.float().logsumexp(-1)).tolist(), abs=1e-5)


def test_a_row_depends_on_itself_alone(device) -> None:
    """Not on its neighbours, its number, its stride; nor its token on the tiles."""
    x, settings = logits(12, 70, 5, device), SETTINGS[::3]
    seeds, places = torch.arange(12, device=device) * 2**40, torch.arange(12, device=device) + 100
    tokens, logprobs = drawn(x, settings, seeds, places)
    back = drawn(x.flip(0), settings[::-1], seeds.flip(0), places.flip(0))
    assert torch.equal(back[0].flip(0), tokens) and torch.equal(back[1].flip(0), logprobs)
    wide = torch.zeros(12, 100, device=device)
    wide[:, 10:80] = x
    for got, want in zip(drawn(wide[:, 10:80], settings, seeds, places), (tokens, logprobs), strict=True):
        assert torch.equal(got, want)
    for i in (0, 5, 11):
        alone = drawn(x[i : i + 1], settings[i], seeds[i], places[i])
        assert alone[0] == tokens[i] and alone[1] == logprobs[i]


def test_no_rows_and_wrong_arguments(device) -> None:
    assert drawn(torch.zeros(0, 5, device=device), [])[0].shape == (0,)
    assert argmax(torch.zeros(0, 5, device=device)).shape == (0,)
    with pytest.raises(ValueError, match="logits must be"):
        argmax(torch.zeros(5, device=device))
    with pytest.raises(ValueError, match="logits must be"):
        drawn(torch.zeros(5, 2, device=device).t(), {})
    with pytest.raises(ValueError, match="seeds must be torch.int64"):
        drawn(torch.zeros(2, 5, device=device), {}, seed=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="out must be"):
        argmax(torch.zeros(2, 5, device=device), torch.zeros(3, dtype=torch.int64, device=device))


def test_the_benchmark_counts_the_bytes() -> None:
    paper = runpy.run_path(str(Path(__file__).with_name("bench_sampling.py")))["paper"]
    assert paper(3, 100, 4, "top_k") == dict(bytes=1200, flops=300)
