"""What lies between a fused QKV projection and attention, in one launch: RMSNorm of each head of q and k (Qwen3,
Gemma 3), rotary position embedding, and the new keys and values into the paged cache.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from hf_cb.kernels.device import on
from hf_cb.kernels.triton.kv_store import as_stored, cache_for_kernel, check_slots, scale_stride
from hf_cb.kernels.triton.rotary import store_pairs, turned


@triton.jit(do_not_specialize=["slot_mapping"])
def rope_store_kernel(
    q,
    k,
    v,
    cos,
    sin,
    q_weight,
    k_weight,
    q_out,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale,
    v_scale,
    eps,
    offset,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_cos_token,
    stride_cos_pair,
    stride_sin_token,
    stride_sin_pair,
    stride_out_token,
    stride_out_head,
    stride_k_block,
    stride_k_slot,
    stride_k_cache_head,
    stride_v_block,
    stride_v_slot,
    stride_v_cache_head,
    stride_k_scale,
    stride_v_scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_FP32: tl.constexpr,
    COPY_REST: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (T * groups of HEADS heads): first a token's queries, then its keys and values."""
    Q_GROUPS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    GROUPS: tl.constexpr = Q_GROUPS + (KV_HEADS + HEADS - 1) // HEADS
    token, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    # what all heads share is read by each of them: a row that is spread over threads would go through shared memory
    pair = tl.arange(0, HALF_PAD)[None, :] + tl.zeros([HEADS, 1], tl.int32)
    cos = tl.load(cos + token * stride_cos_token + pair * stride_cos_pair, mask=pair < HALF, other=0.0)
    sin = tl.load(sin + token * stride_sin_token + pair * stride_sin_pair, mask=pair < HALF, other=0.0)
    rest_cols = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    if group < Q_GROUPS:
        head = group * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
        mask = head < Q_HEADS
        row = q + token * stride_q_token + head * stride_q_head
        a, b, rest = turned(
            row, mask, q_weight, cos, sin, eps, offset, DIM, HALF, HALF_PAD, REST_PAD, INTERLEAVED, IN_FP32
        )
        row = q_out + token * stride_out_token + head * stride_out_head
        store_pairs(row, mask, a, b, HALF, HALF_PAD, INTERLEAVED)
        if COPY_REST:
            tl.store(row + rest_cols, rest, mask=mask & (rest_cols < DIM))
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            block, place = slot // PAGE, slot % PAGE
            head = (group - Q_GROUPS) * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
            mask = head < KV_HEADS
            row = k + token * stride_k_token + head * stride_k_head
            a, b, rest = turned(
                row, mask, k_weight, cos, sin, eps, offset, DIM, HALF, HALF_PAD, REST_PAD, INTERLEAVED, IN_FP32
            )
            row = k_cache + block * stride_k_block + place * stride_k_slot + head * stride_k_cache_head
            a = as_stored(a, k_cache, k_scale, head, mask, stride_k_scale)
            b = as_stored(b, k_cache, k_scale, head, mask, stride_k_scale)
            store_pairs(row, mask, a, b, HALF, HALF_PAD, INTERLEAVED)
            if 2 * HALF < DIM:
                rest = as_stored(rest, k_cache, k_scale, head, mask, stride_k_scale)
                tl.store(row + rest_cols, rest, mask=mask & (rest_cols < DIM))
            v_cols = tl.arange(0, V_PAD)[None, :]
            v_mask = mask & (v_cols < V_DIM)
            values = tl.load(v + token * stride_v_token + head * stride_v_head + v_cols, mask=v_mask)
            row = v_cache + block * stride_v_block + place * stride_v_slot + head * stride_v_cache_head
            tl.store(row + v_cols, as_stored(values, v_cache, v_scale, head, mask, stride_v_scale), mask=v_mask)


@functools.cache  # a launch should not take longer than the kernel
def config_for(num_heads: int, num_kv_heads: int, dim: int, v_dim: int, rotary_dim: int) -> dict[str, int]:
    """Constants and launch options of a layer's shape: about 1,024 elements a program, 16 a thread."""
    pad = triton.next_power_of_2(dim)
    heads = max(min(triton.next_power_of_2(max(num_heads, num_kv_heads)), 1024 // pad), 1)
    return dict(
        Q_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=dim,
        V_DIM=v_dim,
        HALF=rotary_dim // 2,
        HALF_PAD=triton.next_power_of_2(rotary_dim // 2),
        REST_PAD=triton.next_power_of_2(max(dim - rotary_dim, 1)),
        V_PAD=triton.next_power_of_2(v_dim),
        HEADS=heads,
        num_warps=max(heads * pad // 512, 1),
        num_stages=1,
    )


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    weight_in_fp32: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_out: Tensor | None = None,
) -> Tensor:
    """Rotates q `[T, Hq, D]` in place and k `[T, Hkv, D]` on its way into the cache, and stores v `[T, Hkv, Dv]` too.

    The caches, slots and scales are those of `kv_store.store_kv`; k and v themselves are left as they are, and a token
    whose slot is negative still has its queries rotated.

    Args:
        q, k, v: any strides but the last, which is 1: views into one projection `[T, (Hq + 2 Hkv) * D]`, for instance.
        cos, sin: `[T, rotary_dim]` as transformers' rotary modules give them, one row a token and the second half a
            repetition of the first, of which only the first half is read. Factors that repeat each number twice
            instead (Cohere) are given as `cos[:, ::2]`, with `rotary_dim`. Any float dtype.
        interleaved: False turns element i with i + rotary_dim / 2 (NeoX, Llama), True 2i with 2i + 1 (GPT-J, GLM).
        rotary_dim: how many elements of a head turn, the first ones; the others are kept. None: as cos is wide.
        q_weight, k_weight: `[D]`, for heads that are normalised first, with `eps`, `offset` and `weight_in_fp32` as in
            `rms_norm.rms_norm`; both or neither.
        q_out: where to write the queries instead, of q's shape and dtype.

    Returns:
        The rotated queries: q or q_out.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit together.
    """
    bits = cache_for_kernel("k", k_cache, k, k_scale), cache_for_kernel("v", v_cache, v, v_scale)
    check_slots(slot_mapping, k.shape[0])
    q_out = q if q_out is None else q_out
    tokens, num_heads, dim = q.shape
    rotary_dim = cos.shape[-1] if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= dim:
        raise ValueError(f"rotary_dim must be even and between 2 and the head's {dim}, not {rotary_dim}.")
    for name, factor in (("cos", cos), ("sin", sin)):
        if factor.dim() != 2 or factor.shape[0] != tokens or factor.shape[1] < rotary_dim // 2:
            raise ValueError(
                f"{name} must be [{tokens}, {rotary_dim}], not {tuple(factor.shape)}: gather a row for each token."
            )
    wanted = dict(q=q.shape, q_out=q.shape, k=(tokens, k.shape[1], dim), v=(tokens, k.shape[1], v.shape[2]))
    for (name, shape), x in zip(wanted.items(), (q, q_out, k, v), strict=True):
        if x.shape != shape or x.stride(-1) != 1 or x.dtype != q.dtype:
            raise ValueError(
                f"{name} must be {q.dtype} {tuple(shape)} with a contiguous last dimension, not {x.dtype} "
                f"{tuple(x.shape)} with strides {x.stride()}."
            )
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    if len(weights) == 1 or any(weight.shape != (dim,) or weight.stride(0) != 1 for weight in weights):
        raise ValueError(f"q_weight and k_weight must both be [{dim}] and contiguous, or both None.")
    if not tokens:
        return q_out
    config = config_for(num_heads, k.shape[1], dim, v.shape[2], rotary_dim)
    groups = triton.cdiv(num_heads, config["HEADS"]) + triton.cdiv(k.shape[1], config["HEADS"])
    with on(q.device):
        rope_store_kernel[(tokens * groups,)](
            q,
            k,
            v,
            cos,
            sin,
            q_weight,
            k_weight,
            q_out,
            *bits,
            slot_mapping,
            k_scale,
            v_scale,
            eps,
            offset,
            *(stride for x in (q, k, v, cos, sin, q_out) for stride in x.stride()[:2]),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            scale_stride(k_scale),
            scale_stride(v_scale),
            PAGE=k_cache.shape[1],
            INTERLEAVED=interleaved,
            IN_FP32=weight_in_fp32,
            COPY_REST=rotary_dim < dim and (bool(weights) or q_out is not q),
            **config,
        )
    return q_out
