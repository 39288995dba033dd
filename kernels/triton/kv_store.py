"""Writes a step's new keys and values into a paged cache, each token to its slot.

A cache that keeps fp8 holds the bits of e4m3 (OCP's "E4M3FN": largest number 448, no infinities), as float8_e4m3fn or,
where the hardware has no such type (sm_80), as uint8. The bits are made by integer arithmetic, so that they are the
same everywhere; a store waits for memory and not for those ten instructions.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cb.kernels.device import on

BITS_OF_E4M3 = (torch.float8_e4m3fn, torch.uint8)


@triton.jit
def to_e4m3(x):
    """float32 to the bits of e4m3, to the nearest and ties to even; what is too large becomes +-448, NaN stays."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448: as integers, sizes are ordered like the numbers
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # the exponent's bias is 7 instead of 127
    # below 2^-6 the result counts in units of 2^-9, which is what the last bit of 2^14 + x stands for
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    found = tl.where(size < 0x3C800000, small, normal)
    return (sign | tl.where(x != x, 0x7F, found)).to(tl.uint8)


@triton.jit
def as_stored(x, cache, scale, heads, mask, stride_scale):
    """Elements as the cache keeps them; `scale`: one for each of `heads`, to divide by, or None."""
    if cache.dtype.element_ty == tl.uint8:
        x = x.to(tl.float32)
        if scale is not None:
            x = tl.div_rn(x, tl.load(scale + heads * stride_scale, mask=mask, other=1.0))
        return to_e4m3(x)
    else:
        return x.to(cache.dtype.element_ty)


@triton.jit
def _store_part(
    x,
    cache,
    scale,
    token,
    part,
    block,
    offset,
    stride_token,
    stride_head,
    stride_block,
    stride_slot,
    stride_cache_head,
    stride_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # one flat range over heads and dimensions: sizes that are no powers of two waste the end of a row, not of each head
    i = part * BLOCK + tl.arange(0, BLOCK)
    mask = i < HEADS * DIM
    head, dim = (i // DIM).to(tl.int64), i % DIM
    new = tl.load(x + token * stride_token + head * stride_head + dim, mask=mask)
    at = cache + block * stride_block + offset * stride_slot + head * stride_cache_head + dim
    tl.store(at, as_stored(new, cache, scale, head, mask, stride_scale), mask=mask)


@triton.jit(do_not_specialize=["slot_mapping"])
def store_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_scale,
    v_scale,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_block,
    stride_k_slot,
    stride_k_cache_head,
    stride_v_block,
    stride_v_slot,
    stride_v_cache_head,
    stride_k_scale,
    stride_v_scale,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (T * PARTS): each program a part of one token's keys, and the same part of its values."""
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block, offset = slot // PAGE, slot % PAGE
    _store_part(
        k,
        k_cache,
        k_scale,
        token,
        part,
        block,
        offset,
        stride_k_token,
        stride_k_head,
        stride_k_block,
        stride_k_slot,
        stride_k_cache_head,
        stride_k_scale,
        HEADS,
        K_DIM,
        BLOCK,
    )
    _store_part(
        v,
        v_cache,
        v_scale,
        token,
        part,
        block,
        offset,
        stride_v_token,
        stride_v_head,
        stride_v_block,
        stride_v_slot,
        stride_v_cache_head,
        stride_v_scale,
        HEADS,
        V_DIM,
        BLOCK,
    )


@functools.cache  # a launch should not take longer than the kernel
def config_for(num_kv_heads: int, dim: int, v_dim: int) -> dict[str, int]:
    """Constants and launch options of a layer's shape: eight elements of keys and eight of values a thread."""
    size = num_kv_heads * max(dim, v_dim)
    block = min(triton.next_power_of_2(size), 2048)
    return dict(
        HEADS=num_kv_heads,
        K_DIM=dim,
        V_DIM=v_dim,
        PARTS=triton.cdiv(size, block),
        BLOCK=block,
        num_warps=max(block // 256, 1),
        num_stages=1,
    )


def cache_for_kernel(name: str, cache: Tensor, new: Tensor, scale: Tensor | None) -> Tensor:
    """The cache as the kernels take it, checked against its new elements `[T, Hkv, D]`."""
    if new.dim() != 3 or new.stride(-1) != 1:
        raise ValueError(
            f"{name} must be [T, Hkv, D] with a contiguous last dimension, not {tuple(new.shape)} with strides "
            f"{new.stride()}: call .contiguous() or .view() first."
        )
    if cache.dim() != 4 or cache.shape[2:] != new.shape[1:] or cache.stride(-1) != 1:
        raise ValueError(
            f"{name}_cache must be [num_blocks, page, {new.shape[1]}, {new.shape[2]}] with a contiguous last "
            f"dimension, not {tuple(cache.shape)} with strides {cache.stride()}: allocate it for {name}'s heads."
        )
    if cache.dtype in BITS_OF_E4M3:
        if scale is not None and (scale.dtype != torch.float32 or scale.numel() not in (1, new.shape[1])):
            raise ValueError(
                f"{name}_scale must be float32 with 1 or {new.shape[1]} elements, not {scale.dtype} "
                f"{tuple(scale.shape)}: one for the layer or one for each KV head."
            )
        return cache.view(torch.uint8)
    if cache.dtype != new.dtype:
        raise ValueError(
            f"{name}_cache is {cache.dtype} and {name} is {new.dtype}: allocate the cache in {new.dtype} or in "
            "float8_e4m3fn."
        )
    if scale is not None:
        raise ValueError(f"{name}_scale is for fp8 caches, and {name}_cache is {cache.dtype}: leave it None.")
    return cache


def scale_stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes k `[T, Hkv, D]` and v `[T, Hkv, Dv]` to k_cache `[num_blocks, page, Hkv, D]` and v_cache `[..., Dv]`.

    Token t goes to slot `slot_mapping[t]` = block * page + offset, and nowhere if that is negative. The idea of a slot
    mapping is vLLM's. No slot may occur twice, and slots past the cache's end are not noticed.

    Args:
        k, v: any strides but the last, which is 1; so are the caches.
        slot_mapping: int32 or int64 `[T]`, contiguous.
        k_scale, v_scale: for caches of float8_e4m3fn (or uint8 with its bits): float32, one element or `[Hkv]`, by
            which the elements are divided before they are rounded to the nearest and cut off at 448.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit together.
    """
    bits = cache_for_kernel("k", k_cache, k, k_scale), cache_for_kernel("v", v_cache, v, v_scale)
    check_slots(slot_mapping, k.shape[0])
    if k.shape[:2] != v.shape[:2] or k_cache.shape[:2] != v_cache.shape[:2]:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)}, or their caches, differ in more than the last size."
        )
    if not k.shape[0]:
        return
    config = config_for(k.shape[1], k.shape[2], v.shape[2])
    with on(k.device):
        store_kv_kernel[(k.shape[0] * config["PARTS"],)](
            k,
            v,
            *bits,
            slot_mapping,
            k_scale,
            v_scale,
            *k.stride()[:2],
            *v.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            scale_stride(k_scale),
            scale_stride(v_scale),
            PAGE=k_cache.shape[1],
            **config,
        )


def check_slots(slot_mapping: Tensor, tokens: int) -> None:
    if slot_mapping.dtype not in (torch.int32, torch.int64) or slot_mapping.shape != (tokens,):
        raise ValueError(
            f"slot_mapping must be int32 or int64 [{tokens}], not {slot_mapping.dtype} {tuple(slot_mapping.shape)}."
        )
    if tokens > 1 and slot_mapping.stride(0) != 1:
        raise ValueError("slot_mapping must be contiguous: call .contiguous() first.")
