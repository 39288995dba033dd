"""Rotary position embedding (Su et al., RoFormer, 2021) of one tile of heads, for the kernels that contain it.

It rounds where transformers' modules do: `q * cos` and `rotate_half(q) * sin` each, and their sum. The products have
the dtype that torch gives them: with factors of q's own dtype that is q's, with float32 factors it is float32. A norm
before it is that of `rms_norm`, and its result is rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_cb.kernels.triton.rms_norm import weighted


@triton.jit
def load_pairs(row, mask, HALF: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """What turns together, `[rows, HALF_PAD]` each, from pointers to rows `[rows, 1]`."""
    if INTERLEAVED:  # one load of neighbours, taken apart in registers
        cols = tl.arange(0, 2 * HALF_PAD)[None, :]
        x = tl.load(row + cols, mask=mask & (cols < 2 * HALF), other=0.0)
        return tl.split(tl.reshape(x, [row.shape[0], HALF_PAD, 2]))
    else:
        cols = tl.arange(0, HALF_PAD)[None, :]
        mask = mask & (cols < HALF)
        return tl.load(row + cols, mask=mask, other=0.0), tl.load(row + HALF + cols, mask=mask, other=0.0)


@triton.jit
def store_pairs(row, mask, a, b, HALF: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        cols = tl.arange(0, 2 * HALF_PAD)[None, :]
        tl.store(row + cols, tl.interleave(a, b), mask=mask & (cols < 2 * HALF))
    else:
        cols = tl.arange(0, HALF_PAD)[None, :]
        tl.store(row + cols, a, mask=mask & (cols < HALF))
        tl.store(row + HALF + cols, b, mask=mask & (cols < HALF))


@triton.jit
def _product(x, factor):
    product = x.to(tl.float32) * factor.to(tl.float32)
    if x.dtype == factor.dtype:
        product = product.to(x.dtype).to(tl.float32)
    return product


@triton.jit
def turned(
    row,
    mask,
    weight,
    cos,
    sin,
    eps,
    offset,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """Heads, normalised and rotated: both halves, and the rest that does not turn (if there is one)."""
    a, b = load_pairs(row, mask, HALF, HALF_PAD, INTERLEAVED)
    dtype: tl.constexpr = a.dtype
    rest = a
    cols = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    if 2 * HALF < DIM:
        rest = tl.load(row + cols, mask=mask & (cols < DIM), other=0.0)
    if weight is not None:
        a, b = a.to(tl.float32), b.to(tl.float32)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if 2 * HALF < DIM:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        first = weight + tl.zeros([row.shape[0], 1], tl.int32)
        weight_a, weight_b = load_pairs(first, tl.full([1, 1], 1, tl.int1), HALF, HALF_PAD, INTERLEAVED)
        a = weighted(a * scale, weight_a, offset, IN_FP32, dtype).to(dtype)
        b = weighted(b * scale, weight_b, offset, IN_FP32, dtype).to(dtype)
        if 2 * HALF < DIM:
            weight_rest = tl.load(first + cols, mask=cols < DIM, other=0.0)
            rest = weighted(rest.to(tl.float32) * scale, weight_rest, offset, IN_FP32, dtype).to(dtype)
    turned_a = _product(a, cos) - _product(b, sin)
    turned_b = _product(b, cos) + _product(a, sin)
    return turned_a.to(dtype), turned_b.to(dtype), rest
