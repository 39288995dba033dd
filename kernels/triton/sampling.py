"""Tokens from logits as `generate` samples them: temperature, top-k, top-p, min-p, then a draw; all rows in one launch.

One program a row. Rows are independent, and the short searches of one row each need what the one before has found, so
that cutting a row into several programs would take a launch for every one of them; the row comes from the L2 cache
after its first reading. See `selection` for how the filters cut.

The draw is Gumbel's: the token with the largest score - log(E), each E an exponential random number of its own from
Philox (Salmon et al., 2011), which counts by seed, position and token alone. So a request's token does not depend on
the other rows, on its own row's number, or on how the work is cut into tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cb.kernels.device import on
from hf_cb.kernels.triton.selection import (
    LEAST,
    LOWEST,
    STAGES,
    below,
    bound_of_top_k,
    bracket_of_top_p,
    candidates,
    cut,
    first_kept,
    first_of_largest,
    list_candidates,
    survey,
)

NOT_A_NUMBER, NO_TOKEN = -1, -2  # in place of a token: a logit is NaN; no token has a probability above zero
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BY_ROW = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions", "out", "logprobs")


@triton.jit
def exponential(seed, position, token, tile, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """An exponential random number for each token of a tile. Four neighbours share a call of Philox."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    if LISTED:
        a, b, c, d = tl.philox(seed, (token >> 2).to(tl.uint32), low, high, 0)
        bits = tl.where(token & 2 == 0, tl.where(token & 1 == 0, a, b), tl.where(token & 1 == 0, c, d))
    else:
        quads = (tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        a, b, c, d = tl.philox(seed, quads, low, high, 0)
        bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    # u in (0, 1), with all its digits where it is small: small numbers win, and are the ones that matter
    u = tl.minimum(bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    return tl.where(u < 0.01, u * (1.0 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - u))


@triton.jit
def draw(source, k, limit, min_p, high, base, whole, seed, position, top, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """The token drawn from the candidates, and the mass of all that could have been.

    k, limit, min_p: 0 where the filter is off; `limit` is 1 - top_p. high, base, whole: of the bracket of top-p.
    """
    row, vocab, bound, temperature, listed, count, tiles = source
    least = tl.div_rn(bound, temperature)
    floor, value, start = tl.full([], LOWEST, tl.float32), tl.full([], LOWEST, tl.float32), tl.zeros([], tl.int32)
    if k > 0:
        number = tl.sum(count, 0)
        if number > k:
            floor, fallen = cut(source, least, top, 0.0, (number - k).to(tl.float32), floor, top, False, LISTED, BLOCK)
            least = floor
    if limit > 0:
        if k > 0:
            whole, least_, largest = below(source, float("inf"), floor, top, True, LISTED, BLOCK)
        spare = limit * whole
        value, lost = cut(source, least, tl.div_rn(high, temperature), base, spare, floor, top, True, LISTED, BLOCK)
        start = first_kept(source, value, lost, spare, top, LISTED, BLOCK)
    if min_p > 0:
        floor = tl.maximum(floor, tl.minimum(top + tl.log(min_p), top))
    best, winner = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tiles, num_stages=1 if LISTED else STAGES):
        token, score, held = candidates(source, tile, LISTED, BLOCK)
        kept = held & (score >= floor) & ((score > value) | ((score == value) & (token >= start)))
        race = score - tl.log(exponential(seed, position, token, tile, LISTED, BLOCK))
        better = kept & (race > best)
        best, winner = tl.where(better, race, best), tl.where(better, token, winner)
        mass += tl.where(kept, tl.exp(score - top), 0.0)
    return tl.min(tl.where(best == tl.max(best, 0), winner, 0x7FFFFFFF), 0), tl.sum(mass, 0)


@triton.jit
def sample_row(
    row,
    vocab,
    most,
    top,
    temperature,
    k,
    limit,
    min_p,
    seed,
    position,
    listed,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A row's token and its log-probability; -2 where none has a probability."""
    score = tl.div_rn(top, temperature)
    if tl.abs(score) == float("inf"):
        token, logprob = tl.full([], -2, tl.int32), tl.full([], float("nan"), tl.float32)
    else:
        bound, high = tl.full([], LEAST, tl.float32), top
        base, whole = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
        count = tl.zeros([BLOCK], tl.int32)
        depth = DEPTH + 1
        if (k > 0) | (limit > 0) | (min_p > 0):
            if k > 0:
                bound = tl.maximum(bound, bound_of_top_k(most, top, k))
            elif limit > 0:
                bound, high, base, whole = bracket_of_top_p(row, vocab, most, top, temperature, limit, BLOCK)
            if (min_p > 0) & (limit <= 0):
                floor = top + temperature * tl.log(min_p)
                bound = tl.maximum(bound, floor - 1e-6 * (tl.abs(floor) + tl.abs(top)))
            count = list_candidates(row, vocab, bound, listed, BLOCK, DEPTH)
            depth = tl.max(count, 0)
        if depth <= DEPTH:
            source = (row, vocab, bound, temperature, listed, count, depth)
            token, mass = draw(source, k, limit, min_p, high, base, whole, seed, position, score, True, BLOCK)
        else:  # in smaller tiles: the random numbers for these would not fit in the registers
            source = (row, vocab, bound, temperature, listed, count, tl.cdiv(vocab, BLOCK // 2))
            token, mass = draw(source, k, limit, min_p, high, base, whole, seed, position, score, False, BLOCK // 2)
        x = tl.load(row + token).to(tl.float32)
        logprob = tl.div_rn(x, temperature) - score - tl.log(mass)
    return token, logprob


@triton.jit(do_not_specialize=BY_ROW)
def sample_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    out,
    logprobs,
    listed,
    vocab,
    stride_row,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid (R)."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * stride_row
    temperature = tl.load(temperatures + r)
    most, place = survey(row, vocab, BLOCK)
    top, token, broken = first_of_largest(most, place)
    logprob = tl.full([], float("nan"), tl.float32)
    if broken:
        token = tl.full([], -1, tl.int32)
    elif temperature > 0:
        k, p = tl.load(top_ks + r), tl.load(top_ps + r)
        token, logprob = sample_row(
            row,
            vocab,
            most,
            top,
            temperature,
            tl.where(k < vocab, k, 0),
            1.0 - p,
            tl.load(min_ps + r),
            tl.load(seeds + r),
            tl.load(positions + r),
            listed + r.to(tl.int64) * DEPTH * BLOCK,
            BLOCK,
            DEPTH,
        )
    elif logprobs is not None:
        lane, mass = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            x = tl.load(row + start + lane, mask=start + lane < vocab, other=LOWEST).to(tl.float32)
            mass += tl.exp(x - top)
        logprob = -tl.log(tl.sum(mass, 0))
    tl.store(out + r, token.to(tl.int64))
    if logprobs is not None:
        tl.store(logprobs + r, logprob)


@triton.jit(do_not_specialize=["out"])
def argmax_kernel(logits, out, vocab, stride_row, BLOCK: tl.constexpr):
    """Grid (R)."""
    r = tl.program_id(0)
    most, place = survey(logits + r.to(tl.int64) * stride_row, vocab, BLOCK)
    top, token, broken = first_of_largest(most, place)
    tl.store(out + r, tl.where(broken, -1, token).to(tl.int64))


def config_for(vocab: int) -> dict[str, int]:
    """Constants and launch options of both kernels (`argmax` has no DEPTH): 8 elements a thread and tile."""
    block = min(max(triton.next_power_of_2(vocab), 64), 4096)
    return dict(BLOCK=block, DEPTH=8, num_warps=max(block // 256, 1), num_stages=1)


def _check(logits: Tensor, rows: dict[str, tuple[Tensor | None, torch.dtype]]) -> None:
    if logits.dim() != 2 or not logits.shape[1] or logits.dtype not in DTYPES or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be float32, bfloat16 or float16 [R, V] with a contiguous last dimension, not {logits.dtype} "
            f"{tuple(logits.shape)} with strides {logits.stride()}."
        )
    for name, (tensor, dtype) in rows.items():
        if tensor is not None and (
            tensor.shape != logits.shape[:1] or tensor.dtype != dtype or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be {dtype} [{logits.shape[0]}] and contiguous, not {tensor.dtype} {tuple(tensor.shape)}."
            )


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    out: Tensor | None = None,
    logprobs_out: Tensor | None = None,
) -> Tensor:
    """One token for each row of logits `[R, V]`, as `generate` samples with its warpers in their order.

    top-k keeps all that equal the k-th; of the tokens at which top-p cuts those with the higher index stay; min-p keeps
    what has at least that share of the largest probability. Takes up to 64 KiB of memory a row for a moment.

    Args:
        logits: float32, bfloat16 or float16, contiguous in the last dimension; computed in float32.
        temperature: float32 `[R]`; 0 takes the first of the largest logits, and the other settings are ignored.
        top_k: int32 `[R]`, 0 for off. top_p: float32 `[R]`, 1 for off. min_p: float32 `[R]`, 0 for off.
        seeds, positions: int64 `[R]`: what the random numbers depend on, together with the token.
        out: int64 `[R]`.
        logprobs_out: float32 `[R]`, for the log-probability of each token among those that could have been drawn; of
            greedy rows among all.

    Returns:
        int64 `[R]`; NOT_A_NUMBER where a logit is NaN, NO_TOKEN where the largest score is infinite, either way.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit.
    """
    if out is None:
        out = torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)
    settings = dict(temperature=(temperature, torch.float32), top_k=(top_k, torch.int32), top_p=(top_p, torch.float32))
    settings |= dict(min_p=(min_p, torch.float32), seeds=(seeds, torch.int64), positions=(positions, torch.int64))
    _check(logits, settings | dict(out=(out, torch.int64), logprobs_out=(logprobs_out, torch.float32)))
    (rows, vocab), config = logits.shape, config_for(logits.shape[1])
    listed = torch.empty(rows, config["DEPTH"] * config["BLOCK"], dtype=torch.int16, device=logits.device)
    if rows:
        given = (tensor for tensor, _ in settings.values())
        with on(logits.device):
            sample_kernel[(rows,)](logits, *given, out, logprobs_out, listed, vocab, logits.stride(0), **config)
    return out


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """The first of the largest of each row of logits `[R, V]`: int64 `[R]`, NOT_A_NUMBER where one is NaN.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit, as in `sample`.
    """
    if out is None:
        out = torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)
    _check(logits, dict(out=(out, torch.int64)))
    (rows, vocab), config = logits.shape, config_for(logits.shape[1])
    del config["DEPTH"]
    if rows:
        with on(logits.device):
            argmax_kernel[(rows,)](logits, out, vocab, logits.stride(0), **config)
    return out
