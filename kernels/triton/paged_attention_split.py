"""Paged attention with the keys of a request cut into pieces, for steps with too few query tiles to fill the device.

Flash decoding with a plan made on the device: all requests share a budget of pieces, fixed at launch, and a request
gets pieces in proportion to its keys, so that no piece is much longer than another however unlike the lengths are.
Every program works the plan out from `cu_seqlens_q` and `seq_lens` for itself: a captured graph stays right when they
change, and nothing is read back. A piece leaves its normalised output and the logarithm of its sum; a second kernel
merges them. A request of one piece is finished by the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_cb.kernels.triton.paged_attention_tile import (
    NO_KEY,
    SCAN,
    UNSPECIALISED,
    attend,
    first_state,
    normalised,
    oldest_key,
    row_addresses,
    scaled,
    tile_positions,
)

LEAST = tl.constexpr(4)  # key tiles in a piece: shorter ones cost more to merge than they save


@triton.jit
def request_work(
    cu_seqlens_q,
    seq_lens,
    i,
    num_requests,
    window,
    chunk,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Query tiles of the requests `i`, and how many key tiles one of them needs, at most."""
    known = i < num_requests
    tokens = tl.load(cu_seqlens_q + i + 1, mask=known, other=0) - tl.load(cu_seqlens_q + i, mask=known, other=0)
    seq_len = tl.load(seq_lens + i, mask=known, other=0)
    tokens = tl.where(seq_len > 0, tokens, 0)
    oldest = oldest_key(tl.maximum(seq_len - tokens, 0), window, chunk)
    seen = tl.minimum(window, chunk) + (BLOCK_M + GROUP - 2) // GROUP + 1  # by a whole tile of tokens
    keys = tl.minimum(tl.cdiv(seq_len, BLOCK_N) - oldest // BLOCK_N, seen // BLOCK_N + 2)
    return tl.cdiv(tokens * GROUP, BLOCK_M), keys


@triton.jit
def piece_length(
    cu_seqlens_q,
    seq_lens,
    num_requests,
    num_splits,
    window,
    chunk,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Key tiles that a piece holds at most: the step's work is then num_splits pieces, and one more a query tile."""
    work = 0
    for start in range(0, num_requests, SCAN):
        i = start + tl.arange(0, SCAN)
        tiles, keys = request_work(cu_seqlens_q, seq_lens, i, num_requests, window, chunk, GROUP, BLOCK_M, BLOCK_N)
        work += tl.sum(tiles * keys)
    return tl.maximum(tl.cdiv(work, num_splits), LEAST)


@triton.jit(do_not_specialize=UNSPECIALISED)
def split_kernel(
    out,
    partial,
    partial_lse,
    q,
    k_cache,
    v_cache,
    sinks,
    k_scale,
    v_scale,
    block_table,
    cu_seqlens_q,
    seq_lens,
    num_requests,
    num_kv_heads,
    num_splits,
    stride_table,
    window,
    chunk,
    inner_scale,
    outer_scale,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_k_scale,
    stride_v_scale,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    V_DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (slots * Hkv): one piece of one query tile each; `partial` float32 `[slots, Hkv, BLOCK_M, V_DIM]`."""
    kv_head, slot = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    length = piece_length(cu_seqlens_q, seq_lens, num_requests, num_splits, window, chunk, GROUP, BLOCK_M, BLOCK_N)
    request, first_slot, counted = 0, 0, 0
    for start in range(0, num_requests, SCAN):
        i = start + tl.arange(0, SCAN)
        tiles, keys = request_work(cu_seqlens_q, seq_lens, i, num_requests, window, chunk, GROUP, BLOCK_M, BLOCK_N)
        slots = tiles * tl.cdiv(keys, length)
        before = (counted + tl.cumsum(slots) <= slot) & (i < num_requests)
        request += tl.sum(before.to(tl.int32))
        first_slot += tl.sum(tl.where(before, slots, 0))
        counted += tl.sum(slots)
    if request >= num_requests:
        return
    _, keys = request_work(cu_seqlens_q, seq_lens, request, num_requests, window, chunk, GROUP, BLOCK_M, BLOCK_N)
    pieces = tl.cdiv(keys, length)
    tile, piece = (slot - first_slot) // pieces, (slot - first_slot) % pieces
    begin = tl.load(cu_seqlens_q + request)
    tokens = tl.load(cu_seqlens_q + request + 1) - begin
    seq_len = tl.load(seq_lens + request)
    first, last = tile_positions(tokens, seq_len, tile, GROUP, BLOCK_M)
    first_key = oldest_key(first, window, chunk)
    low, high = first_key // BLOCK_N, last // BLOCK_N + 1
    share = tl.cdiv(high - low, pieces)
    low += piece * share
    high = tl.minimum(low + share, high)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    positions = seq_len - tokens + rows // GROUP
    mine, cols, v_cols = rows < tokens * GROUP, tl.arange(0, DIM_PAD), tl.arange(0, V_DIM_PAD)
    queries = tl.load(
        row_addresses(q, begin, rows, kv_head, stride_q_token, stride_q_head, cols, GROUP),
        mask=mine[:, None] & (cols < DIM)[None, :],
        other=0.0,
    )
    peak, total = first_state(sinks, rows, kv_head, piece == 0, GROUP, BLOCK_M)
    inner_scale, outer_scale = scaled(inner_scale, outer_scale, k_scale, kv_head * stride_k_scale, SOFTCAP)
    acc, peak, total = attend(
        tl.zeros([BLOCK_M, V_DIM_PAD], tl.float32),
        peak,
        total,
        queries,
        positions,
        oldest_key(positions, window, chunk),
        low,
        high,
        high,
        0,
        k_cache + kv_head.to(tl.int64) * stride_k_head,
        v_cache + kv_head.to(tl.int64) * stride_v_head,
        block_table + request.to(tl.int64) * stride_table,
        first_key,
        seq_len,
        stride_k_block,
        stride_k_slot,
        stride_v_block,
        stride_v_slot,
        inner_scale,
        outer_scale,
        True,
        SOFTCAP,
        PAGE,
        DIM,
        V_DIM,
        DIM_PAD,
        V_DIM_PAD,
        BLOCK_N,
    )
    acc = normalised(acc, total, v_scale, kv_head * stride_v_scale)
    element = mine[:, None] & (v_cols < V_DIM)[None, :]
    if pieces == 1:
        to = row_addresses(out, begin, rows, kv_head, stride_out_token, stride_out_head, v_cols, GROUP)
        tl.store(to, acc.to(out.dtype.element_ty), mask=element)
    else:
        at = (slot.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial_lse + at, tl.where(total > 0, peak + tl.log2(total), NO_KEY), mask=mine)
        tl.store(partial + at[:, None] * V_DIM + v_cols[None, :], acc, mask=element)


@triton.jit(do_not_specialize=UNSPECIALISED)
def merge_kernel(
    out,
    partial,
    partial_lse,
    cu_seqlens_q,
    seq_lens,
    num_requests,
    num_kv_heads,
    num_splits,
    window,
    chunk,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    V_DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Grid (T * Hkv * cdiv(GROUP, HEADS)): HEADS rows of one token, from PIECES pieces at a time."""
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    number, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    kv_head, token = number % num_kv_heads, number // num_kv_heads
    length = piece_length(cu_seqlens_q, seq_lens, num_requests, num_splits, window, chunk, GROUP, BLOCK_M, BLOCK_N)
    request = 0
    for start in range(0, num_requests, SCAN):
        i = start + tl.arange(0, SCAN)
        end = tl.load(cu_seqlens_q + i + 1, mask=i < num_requests, other=token + 1)
        request += tl.sum((end <= token).to(tl.int32))
    if request >= num_requests:
        return
    tiles, keys = request_work(cu_seqlens_q, seq_lens, request, num_requests, window, chunk, GROUP, BLOCK_M, BLOCK_N)
    pieces = tl.cdiv(keys, length)
    if (tiles == 0) | (pieces == 1):
        return
    first_slot = 0
    for start in range(0, request, SCAN):
        i = start + tl.arange(0, SCAN)
        their_tiles, their_keys = request_work(
            cu_seqlens_q, seq_lens, i, request, window, chunk, GROUP, BLOCK_M, BLOCK_N
        )
        first_slot += tl.sum(their_tiles * tl.cdiv(their_keys, length))

    heads = part * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, V_DIM_PAD)
    rows = (token - tl.load(cu_seqlens_q + request)) * GROUP + heads
    slots = (first_slot + rows // BLOCK_M * pieces).to(tl.int64)
    first = (slots * num_kv_heads + kv_head) * BLOCK_M + rows % BLOCK_M
    peak, total = tl.full([HEADS], NO_KEY, tl.float32), tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, V_DIM_PAD], tl.float32)
    for start in range(0, pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        at = first[None, :] + (piece * (num_kv_heads * BLOCK_M))[:, None]
        mine = (piece < pieces)[:, None] & (heads < GROUP)[None, :]
        lse = tl.load(partial_lse + at, mask=mine, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - new_peak[None, :])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 0)
        mask = mine[:, :, None] & (cols < V_DIM)[None, None, :]
        values = tl.load(partial + at[:, :, None] * V_DIM + cols[None, None, :], mask=mask, other=0.0)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        peak = new_peak
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # none in rows past GROUP, nor where no key was seen
    to = out + token.to(tl.int64) * stride_out_token
    to += (kv_head * GROUP + heads).to(tl.int64)[:, None] * stride_out_head + cols[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(heads < GROUP)[:, None] & (cols < V_DIM)[None, :])
