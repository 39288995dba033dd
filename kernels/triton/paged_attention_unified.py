"""Paged attention of a whole step in one launch: each program one tile of query rows against all the keys it sees."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_cb.kernels.triton.paged_attention_tile import (
    UNSPECIALISED,
    attend,
    find_request,
    first_state,
    normalised,
    oldest_key,
    row_addresses,
    scaled,
    tile_positions,
)


@triton.jit(do_not_specialize=UNSPECIALISED)
def unified_kernel(
    out,
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
    """Grid ((T * GROUP // BLOCK_M + R) * Hkv): neighbours read the other heads of the same tokens of the cache."""
    kv_head = tl.program_id(0) % num_kv_heads
    # backwards: within a prompt the last tiles have the most keys, and starting with them leaves no long tail
    number = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_kv_heads
    request, tile = find_request(cu_seqlens_q, num_requests, number, GROUP, BLOCK_M)
    begin = tl.load(cu_seqlens_q + request)
    tokens = tl.load(cu_seqlens_q + request + 1) - begin
    seq_len = tl.load(seq_lens + request)
    if (seq_len <= 0) | (tile * BLOCK_M >= tokens * GROUP):
        return
    first, last = tile_positions(tokens, seq_len, tile, GROUP, BLOCK_M)
    first_key = oldest_key(first, window, chunk)
    low, high = first_key // BLOCK_N, last // BLOCK_N + 1
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    positions = seq_len - tokens + rows // GROUP
    mine, cols, v_cols = (rows < tokens * GROUP)[:, None], tl.arange(0, DIM_PAD), tl.arange(0, V_DIM_PAD)
    queries = tl.load(
        row_addresses(q, begin, rows, kv_head, stride_q_token, stride_q_head, cols, GROUP),
        mask=mine & (cols < DIM)[None, :],
        other=0.0,
    )
    peak, total = first_state(sinks, rows, kv_head, True, GROUP, BLOCK_M)
    inner_scale, outer_scale = scaled(inner_scale, outer_scale, k_scale, kv_head * stride_k_scale, SOFTCAP)
    # Tiles of which every row sees every key need no mask: first those, then the ones around them. Low tiles wait for
    # memory anyway, and would only wait twice for a pipeline to fill.
    full_low = tl.cdiv(oldest_key(last, window, chunk), BLOCK_N)
    full_high = full_low if BLOCK_M <= 32 else tl.maximum((first + 1) // BLOCK_N, full_low)
    k_cache += kv_head.to(tl.int64) * stride_k_head
    v_cache += kv_head.to(tl.int64) * stride_v_head
    block_table += request.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, V_DIM_PAD], tl.float32)
    for masked in tl.static_range(1 if BLOCK_M <= 32 else 0, 2):
        acc, peak, total = attend(
            acc,
            peak,
            total,
            queries,
            positions,
            oldest_key(positions, window, chunk),
            low if masked else full_low,
            high if masked else full_high,
            full_low if masked else full_high,
            full_high - full_low if masked else 0,
            k_cache,
            v_cache,
            block_table,
            first_key,
            seq_len,
            stride_k_block,
            stride_k_slot,
            stride_v_block,
            stride_v_slot,
            inner_scale,
            outer_scale,
            masked == 1,
            SOFTCAP,
            PAGE,
            DIM,
            V_DIM,
            DIM_PAD,
            V_DIM_PAD,
            BLOCK_N,
        )
    acc = normalised(acc, total, v_scale, kv_head * stride_v_scale)
    at = row_addresses(out, begin, rows, kv_head, stride_out_token, stride_out_head, v_cols, GROUP)
    tl.store(at, acc.to(out.dtype.element_ty), mask=mine & (v_cols < V_DIM)[None, :])
