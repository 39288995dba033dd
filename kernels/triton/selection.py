"""Which tokens top-k and top-p leave of one row of logits, without sorting it: one program for the row.

A filter cuts at a score, and that is found by bisection whose ends are always scores of the row, so that it stops at
the exact one (as FlashInfer's dual-pivot sampling and vLLM's Qrita do). Before that the row is thinned out. Its first
reading leaves the maximum of each lane (the elements BLOCK apart), and the k-th largest of those is at most the k-th
largest of all; for top-p two readings find between which of a few scores the cut lies. The candidates that are left are
listed lane by lane, which takes no communication between threads. Where a lane has more than DEPTH of them, as in very
flat distributions, the whole row is read again instead each time.

Logits are what a row holds, scores are logits / temperature. Masses are relative to that of the largest score.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-3.4028234663852886e38)  # of finite numbers: what is excluded, -inf, is no candidate
LOWEST = tl.constexpr(float("-inf"))
STAGES = tl.constexpr(4)  # three tiles on their way: what one SM takes from the L2 cache while it waits for it


@triton.jit
def survey(row, vocab, BLOCK: tl.constexpr):
    """The largest logit of each lane, NaN where there is one, and its first place."""
    lane = tl.arange(0, BLOCK)
    most, place = tl.full([BLOCK], LOWEST, tl.float32), lane
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        x = tl.load(row + start + lane, mask=start + lane < vocab, other=LOWEST).to(tl.float32)
        place = tl.where(x > most, start + lane, place)
        most = tl.maximum(most, x, propagate_nan=tl.PropagateNan.ALL)
    return most, place


@triton.jit
def first_of_largest(most, place):
    """Of a survey: the largest logit, its first place, and whether there is a NaN."""
    top = tl.max(most, 0)
    return top, tl.min(tl.where(most == top, place, 0x7FFFFFFF), 0), tl.max((most != most).to(tl.int32), 0) > 0


@triton.jit
def rank_of(x):
    """float32 as whole numbers in the same order, without gaps."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def number_of(rank):
    bits = rank.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bound_of_top_k(most, top, k):
    """A logit that is at most the k-th largest, and near it if k is much less than the number of lanes."""
    low, high = tl.full([], -2139095041, tl.int64), rank_of(top)  # from -inf on
    while low < high:
        middle = (low + high + 1) >> 1
        found = tl.sum((most >= number_of(middle)).to(tl.int32), 0)
        low, high = tl.where(found >= k, middle, low), tl.where(found >= k, high, middle - 1)
        high = tl.where((found == k) | (high - low < 4096), low, high)  # 4096: a sixteenth of bfloat16's last place
    bound = number_of(low)
    return bound - tl.abs(bound) * 1e-6  # what is less than it may still have the same score


@triton.jit
def bracket_of_top_p(row, vocab, most, top, temperature, limit, BLOCK: tl.constexpr):
    """Logits low and high between which top-p cuts, the mass of all that is less than low, and that of the whole row.

    All that is below a share of `limit` / vocab falls, so that the bracket starts there: 1/12 of the way to the top is
    left of it, about one in the exponent.
    """
    lane, factor = tl.arange(0, BLOCK), 1.0 / temperature
    low, high = tl.full([], LEAST, tl.float32), top
    base, whole = tl.zeros([], tl.float32), tl.sum(tl.exp((most - top) * factor), 0)
    first = tl.maximum(top + temperature * (tl.log(limit * whole / vocab) - 1e-3), -1e38)
    step = (top - first) / 3
    for _ in range(2):
        second, third = first + step, first + 2 * step
        masses = tl.zeros([BLOCK], tl.float32)
        masses_1, masses_2, masses_3 = masses, masses, masses
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            x = tl.load(row + start + lane, mask=start + lane < vocab, other=LOWEST).to(tl.float32)
            mass = tl.exp((x - top) * factor)
            masses += mass
            masses_1 += tl.where(x < first, mass, 0.0)
            masses_2 += tl.where(x < second, mass, 0.0)
            masses_3 += tl.where(x < third, mass, 0.0)
        whole = tl.sum(masses, 0)
        spare, one, two, three = limit * whole, tl.sum(masses_1, 0), tl.sum(masses_2, 0), tl.sum(masses_3, 0)
        high = tl.where(one > spare, first, tl.where(two > spare, second, tl.where(three > spare, third, high)))
        low = tl.where(three <= spare, third, tl.where(two <= spare, second, tl.where(one <= spare, first, low)))
        base = tl.where(three <= spare, three, tl.where(two <= spare, two, tl.where(one <= spare, one, base)))
        step = (high - low) / 4
        first = low + step
    return low, high, base, whole


@triton.jit
def list_candidates(row, vocab, bound, listed, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Writes which logits are at least `bound` to listed int16 `[DEPTH, BLOCK]`: for each lane one after the other the
    tiles in which it has one. Returns how many each lane has."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        x = tl.load(row + start + lane, mask=start + lane < vocab, other=LOWEST).to(tl.float32)
        found = x >= bound
        tile = ((start + lane) // BLOCK).to(tl.int16)
        tl.store(listed + count * BLOCK + lane, tile, mask=found & (count < DEPTH))
        count += found.to(tl.int32)
    tl.debug_barrier()  # what one thread has written another may read
    return count


@triton.jit
def candidates(source, tile, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """One tile of them: their tokens, their scores, and which places of the tile hold one.

    source: the row, vocab, the least logit of a candidate, the temperature, the list and how many each lane has in it,
    and the number of tiles. LISTED: whether they come from the list; else from the whole row.
    """
    row, vocab, bound, temperature, listed, count, _ = source
    lane = tl.arange(0, BLOCK)
    if LISTED:
        held = tile < count
        token = tl.load(listed + tile * BLOCK + lane, mask=held, other=0).to(tl.int32) * BLOCK + lane
        x = tl.load(row + token, mask=held, other=LOWEST).to(tl.float32)
    else:
        token = tile * BLOCK + lane
        x = tl.load(row + token, mask=token < vocab, other=LOWEST).to(tl.float32)
        held = x >= bound
    return token, tl.div_rn(x, temperature), held


@triton.jit
def below(source, pivot, floor, top, BY_MASS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Of the scores from `floor` on: the mass or number of those below `pivot`, the least that is not, the largest that
    is."""
    total = tl.zeros([BLOCK], tl.float32)
    least, largest = tl.full([BLOCK], float("inf"), tl.float32), tl.full([BLOCK], LOWEST, tl.float32)
    for tile in tl.range(source[6], num_stages=1 if LISTED else STAGES):
        token, score, held = candidates(source, tile, LISTED, BLOCK)
        under = held & (score < pivot) & (score >= floor)
        total += tl.where(under, tl.exp(score - top) if BY_MASS else 1.0, 0.0)
        least = tl.minimum(least, tl.where(held & (score >= pivot), score, float("inf")))
        largest = tl.maximum(largest, tl.where(under, score, LOWEST))
    return tl.sum(total, 0), tl.min(least, 0), tl.max(largest, 0)


@triton.jit
def cut(source, low, high, base, spare, floor, top, BY_MASS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest score such that what lies below it (and `base` besides) is at most `spare`, and how much that is.

    It lies in [low, high]. Middles are taken by value and by rank in turn: the first is fast, the second sure.
    """
    lost, step = base, 0
    while low < high:
        middle = number_of((rank_of(low) + rank_of(high) + 1) >> 1)
        pivot = tl.where(step % 2 == 0, 0.5 * low + 0.5 * high, middle)
        pivot = tl.where(pivot > low, pivot, high)
        found, least, largest = below(source, pivot, floor, top, BY_MASS, LISTED, BLOCK)
        found += base
        fits = (found <= spare) & (least < float("inf"))
        low, high = tl.where(fits, least, low), tl.where(fits, high, largest)
        lost = tl.where(fits, found, lost)
        if not BY_MASS:
            high = tl.where(fits & (found == spare), low, high)
        step += 1
    return low, lost


@triton.jit
def equals_before(source, value, end, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens before `end` have this score."""
    total = tl.zeros([BLOCK], tl.int32)
    for tile in tl.range(source[6], num_stages=1 if LISTED else STAGES):
        token, score, held = candidates(source, tile, LISTED, BLOCK)
        total += (held & (score == value) & (token < end)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def first_kept(source, value, lost, spare, top, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens with the score at which top-p cuts, the first that stays: as many fall as there is mass to spare,
    the lower ones first (generate's sort leaves that open), but one stays."""
    share = tl.floor((spare - lost) / tl.maximum(tl.exp(value - top), 1e-37))
    fall = tl.zeros([], tl.int32)
    if share >= 1:
        equals = equals_before(source, value, source[1], LISTED, BLOCK)
        fall = tl.minimum(share, tl.maximum(equals - 1, 0).to(tl.float32)).to(tl.int32)
    low, high, end = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + source[1], tl.zeros([], tl.int32)
    found = tl.zeros([], tl.int32)
    while found != fall:
        end = (low + high) >> 1
        found = equals_before(source, value, end, LISTED, BLOCK)
        low, high = tl.where(found < fall, end, low), tl.where(found > fall, end, high)
    return end
