"""What the paged attention kernels share: which work there is, and one tile of query rows against a range of keys.

The query heads of one KV head and neighbouring tokens of a request are rows of the same tile (row = token * GROUP +
head within the group; FlashAttention calls it GQA packing), so keys are loaded once for all of them. Tiles of
consecutive requests are numbered as in vLLM's unified kernel: request r's first is `cu_seqlens_q[r] * GROUP // BLOCK_M
+ r`, which leaves a bound on their number that depends on shapes alone. Softmax is FlashAttention's online one, in base
2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SCAN = tl.constexpr(128)  # requests looked at together
UNSPECIALISED = (  # arguments that change from step to step or layer to layer, and whose properties win nothing
    *("block_table", "cu_seqlens_q", "seq_lens", "num_requests", "num_kv_heads", "num_splits", "window", "chunk"),
    *("stride_table", "stride_k_scale", "stride_v_scale"),
)
NO_KEY = tl.constexpr(-1.0e30)  # a running maximum that no score has raised: finite, so that differences are no NaN


@triton.jit
def find_request(cu_seqlens_q, num_requests, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The request that may own query tile `tile`, and that request's own number of the tile."""
    request = -1
    for start in range(0, num_requests, SCAN):
        i = start + tl.arange(0, SCAN)
        begin = tl.load(cu_seqlens_q + i, mask=i < num_requests, other=0)
        request += tl.sum(((begin * GROUP // BLOCK_M + i <= tile) & (i < num_requests)).to(tl.int32))
    begin = tl.load(cu_seqlens_q + request)
    return request, tile - (begin * GROUP // BLOCK_M + request)


@triton.jit
def oldest_key(position, window, chunk):
    """The first key that a query at `position` sees."""
    return tl.maximum(tl.maximum(position - window + 1, position // chunk * chunk), 0)


@triton.jit
def tile_positions(tokens, seq_len, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of the first and the last query of a request's tile."""
    start = tl.maximum(seq_len - tokens, 0)
    last_row = tl.minimum(tile * BLOCK_M + BLOCK_M, tokens * GROUP) - 1
    return start + tile * BLOCK_M // GROUP, start + last_row // GROUP


@triton.jit
def row_addresses(base, begin, rows, kv_head, stride_token, stride_head, cols, GROUP: tl.constexpr):
    """Of the elements `[BLOCK_M, cols]` of a request's query rows in q or out, where its tokens start at `begin`."""
    at = base + begin.to(tl.int64) * stride_token + kv_head.to(tl.int64) * GROUP * stride_head
    at += (rows // GROUP).to(tl.int64)[:, None] * stride_token
    return at + (rows % GROUP).to(tl.int64)[:, None] * stride_head + cols[None, :]


@triton.jit
def first_state(sinks, rows, kv_head, with_sinks, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Running maximum (base 2) and sum before any key: nothing, or the sink's score."""
    peak, total = tl.full([BLOCK_M], NO_KEY, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        score = tl.load(sinks + kv_head * GROUP + rows % GROUP).to(tl.float32)
        peak, total = tl.where(with_sinks, score * LOG2_E, peak), tl.where(with_sinks, total + 1.0, total)
    return peak, total


@triton.jit
def scaled(inner_scale, outer_scale, k_scale, at, SOFTCAP: tl.constexpr):
    """The factors of scores (see `attend`), with that of the keys of a quantised cache."""
    if k_scale is not None:
        if SOFTCAP:
            inner_scale *= tl.load(k_scale + at)
        else:
            outer_scale *= tl.load(k_scale + at)
    return inner_scale, outer_scale


@triton.jit
def normalised(acc, total, v_scale, at):
    """The output of a tile; zero in rows that saw nothing. The values' factor is read late: it is one register less."""
    factor = 1.0 / tl.where(total > 0, total, 1.0)
    if v_scale is not None:
        factor *= tl.load(v_scale + at)
    return acc * factor[:, None]


@triton.jit
def as_float(x, dtype: tl.constexpr):
    """Cache elements as `dtype`; int8 holds the bits of e4m3, where the hardware does not know it."""
    if x.dtype == tl.int8:
        bits = (x.to(tl.int16) << 7) & -0x4080  # float16's sign, and e4m3's seven other bits below it
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)  # the exponent's bias is 7 instead of 15
    elif x.dtype != dtype:
        return x.to(tl.float16).to(dtype)
    else:
        return x


@triton.jit
def load_pages(block_table, tile, seq_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of a key tile's keys: one where the tile lies within a page, else one for each key.

    The table is not read past the request's last page. Entries before its first may be anything: see `load_rows`.
    """
    keys = tile * BLOCK_N if PAGE % BLOCK_N == 0 else tile * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(block_table + tl.minimum(keys, seq_len - 1) // PAGE)


@triton.jit
def load_rows(at, inside, cols, MASKED: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Cache elements `[BLOCK_N, DIM_PAD]`; zero, and not read, of keys that are not `inside`.

    What lies there may be NaN (and so is its product with a weight of 0), or `at` no address at all.
    """
    if MASKED and DIM == DIM_PAD:
        return tl.load(at, mask=inside[:, None], other=0.0)
    elif MASKED:
        return tl.load(at, mask=inside[:, None] & (cols < DIM)[None, :], other=0.0)
    elif DIM != DIM_PAD:
        return tl.load(at, mask=(cols < DIM)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def attend(
    acc,
    peak,
    total,
    q,
    positions,
    oldest,
    low,
    high,
    skip_at,
    skip,
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
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    V_DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the key tiles [low, high), less the `skip` ones from `skip_at` on, to the running output, maximum and sum.

    `block_table` is the request's row, the caches start at the KV head. A row sees the keys from `oldest` (`first_key`
    in the first row) to its own position; without MASKED it sees all keys of these tiles. A score is
    `dot * outer_scale`, or with SOFTCAP `tanh(dot * inner_scale / (2 log2(e))) * outer_scale`; outer_scale has the
    factor log2(e).
    """
    # e4m3 is float16 in half the instructions that bfloat16 takes, and both hold all of it. Queries that are converted
    # come to sm_90's products in registers, of which large tiles have none left.
    narrow: tl.constexpr = k_cache.dtype.element_ty.primitive_bitwidth == 8 and q.dtype == tl.bfloat16
    in_half: tl.constexpr = narrow and (DIM_PAD <= 128 or q.shape[0] <= 32)
    dtype: tl.constexpr = tl.float16 if in_half else q.dtype
    if in_half:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    lanes, cols, v_cols = tl.arange(0, BLOCK_N), tl.arange(0, DIM_PAD), tl.arange(0, V_DIM_PAD)
    # The blocks of the next tile are loaded a round ahead and carried along. Loaded where they are used they would be
    # a stage of their own in Triton's pipeline, and leave the keys one stage less.
    pages = load_pages(block_table, tl.where(low < skip_at, low, low + skip), seq_len, PAGE, BLOCK_N)
    for step in range(low, high - skip):
        tile = tl.where(step < skip_at, step, step + skip)
        keys = tile * BLOCK_N + lanes
        k_rows, v_rows = pages.to(tl.int64) * stride_k_block, pages.to(tl.int64) * stride_v_block
        if BLOCK_N % PAGE == 0 or PAGE % BLOCK_N == 0:  # where a key lies in its page is the same for all tiles, or
            slots = (lanes % PAGE).to(tl.int64)  # is but for where the tile begins
            if PAGE > BLOCK_N:
                start = (tile * BLOCK_N % PAGE).to(tl.int64)
                k_rows, v_rows = k_rows + start * stride_k_slot, v_rows + start * stride_v_slot
        else:
            slots = (keys % PAGE).to(tl.int64)
        k_rows = (k_rows + slots * stride_k_slot)[:, None]
        v_rows = (v_rows + slots * stride_v_slot)[:, None]
        following = tl.where(step + 1 < skip_at, step + 1, step + 1 + skip)
        pages = load_pages(block_table, following, seq_len, PAGE, BLOCK_N)
        inside = (keys >= first_key) & (keys < seq_len)
        k = load_rows(k_cache + k_rows + cols[None, :], inside, cols, MASKED, DIM, DIM_PAD)
        v = load_rows(v_cache + v_rows + v_cols[None, :], inside, v_cols, MASKED, V_DIM, V_DIM_PAD)
        scores = tl.dot(q, tl.trans(as_float(k, dtype)), input_precision="ieee")
        if SOFTCAP:
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * inner_scale))
        if MASKED:
            seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] >= oldest[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * outer_scale)
        p = tl.exp2(scores * outer_scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(dtype), as_float(v, dtype), acc, input_precision="ieee")
        peak = new_peak
    return acc, peak, total
