"""Paged variable-length attention on a CPU: mixed steps of prompt chunks and decodes over one cache."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from hf_cb.kernels.cpu import library as lib
from hf_cb.kernels.lazy_zeros import lazy_zeros

MOST_DIM = 512  # of a head


class Cache(NamedTuple):
    """One layer's keys and values `[Hkv, num_blocks, ...]`, as laid out in `attention.h`. Scales are None unless they
    are int8."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None


def allocate(num_blocks: int, num_kv_heads: int, dim: int, v_dim: int, block_size: int, dtype: torch.dtype) -> Cache:
    """Zeros, whose pages of memory are taken when first written. `dtype` is float32, float16, bfloat16 or int8."""
    v_row = -(-v_dim // 16) * 16
    pairs = dtype == torch.bfloat16
    k_size = (dim + dim % 2 if pairs else dim) * block_size
    v_size = (block_size + block_size % 2 if pairs else block_size) * v_row
    shape, floats = (num_kv_heads, num_blocks), dict(dtype=torch.float32, device="cpu")
    scales = [torch.zeros(*shape, block_size, **floats) for _ in range(2)] if dtype == torch.int8 else [None, None]
    k, v = (lazy_zeros(*shape, size, dtype=dtype) for size in (k_size, v_size))
    return Cache(k, v, *scales)


def describe(
    cache: Cache,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    v_dim: int,
    block_size: int,
    dtype: torch.dtype,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> lib.Attention:
    """What stays the same in every call of a layer. `sinks`: float32 `[Hq]`; the caller keeps it alive."""
    return lib.Attention(
        k_cache=cache.k.data_ptr(),
        v_cache=cache.v.data_ptr(),
        k_scales=lib.pointer(cache.k_scales),
        v_scales=lib.pointer(cache.v_scales),
        sinks=lib.pointer(sinks),
        num_blocks=cache.k.shape[1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dim=dim,
        v_dim=v_dim,
        block_size=block_size,
        window=window or 0,
        chunk=chunk or 0,
        scale=scale,
        softcap=softcap or 0.0,
        dtype=lib.DTYPES[dtype],
        kv_dtype=lib.DTYPES[cache.k.dtype],
    )


def paged_attention(
    table: lib.Table,
    workspace: lib.Workspace,
    layer: lib.Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    threads: int,
) -> Tensor:
    """Stores k `[T, Hkv, D]` and v `[T, Hkv, Dv]` by slot (-1: nowhere), then attends with q `[T, Hq, D]`.

    Args:
        layer: from `describe`; its call-dependent fields are overwritten.
        slot_mapping: int64 `[T]`. block_table: int32 `[R, B]`. cu_seqlens_q: int32 `[R + 1]`. seq_lens: int32 `[R]`.

    Returns:
        `[T, Hq, Dv]`.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape[0], layer.num_heads, layer.v_dim, dtype=q.dtype, device="cpu")
    for name, x in (("q", q), ("k", k), ("v", v)):
        setattr(layer, name, x.data_ptr())
        setattr(layer, f"{name}_token", x.stride(0))
        setattr(layer, f"{name}_head", x.stride(1))
    layer.out, layer.out_token = out.data_ptr(), layer.num_heads * layer.v_dim
    layer.slots, layer.block_table = slot_mapping.data_ptr(), block_table.data_ptr()
    layer.cu_seqlens, layer.seq_lens = cu_seqlens_q.data_ptr(), seq_lens.data_ptr()
    layer.num_requests, layer.max_blocks = block_table.shape
    lib.check(table.attend(workspace.handle, ctypes.byref(layer), threads))
    return out
