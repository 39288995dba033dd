"""Paged variable-length attention: prompt chunks, decodes and mixed steps over one paged KV cache.

Two ways to compute it, chosen here from shapes alone so that a captured graph stays valid: one program a tile of query
rows (`paged_attention_unified`), or the keys in pieces and a merge (`paged_attention_split`), where the tiles alone
would not fill the device or one long request would hold up a step of decodes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hf_cb.kernels.device import on
from hf_cb.kernels.triton.paged_attention_config import (
    MOST_DIM,
    Config,
    Device,
    Shape,
    config_for,
    constexprs,
    device_facts,
    merge_constexprs,
)
from hf_cb.kernels.triton.paged_attention_split import LEAST, merge_kernel, split_kernel
from hf_cb.kernels.triton.paged_attention_unified import unified_kernel

LOG2_E = 1 / math.log(2)
NONE = 2**30  # a window or chunk that hides nothing: the kernels need no variant without one
PROGRAMS_PER_SM = 6  # that a split aims at: two rounds of the three that a multiprocessor of sm_90 holds
HIGH_PER_SM = 3  # of tiles so high that it holds one or two, and that partial results take much memory


@dataclass(frozen=True)
class Plan:
    """How a step of some shapes is launched."""

    config: Config
    tiles: int  # of query rows, at most
    num_splits: int  # 1: the unified kernel

    def workspace(self, num_kv_heads: int, v_dim: int) -> tuple[int, int]:
        """Rows of partial results, and the float32 elements that they take with their logarithms."""
        rows = 0 if self.num_splits == 1 else (self.num_splits + self.tiles) * num_kv_heads * self.config.block_m
        return rows, rows * (v_dim + 1)


@functools.lru_cache(1024)
def plan(
    shape: Shape,
    device: Device,
    num_tokens: int,
    num_requests: int,
    num_kv_heads: int,
    max_seqlen_q: int,
    max_keys: int,
    num_splits: int | None = None,
) -> Plan:
    """Depends on what a captured graph holds fixed only. `max_keys`: the most that a query may see."""
    rows = max_seqlen_q * shape.group
    config = config_for(shape, rows, device.shared_memory)
    tiles = num_tokens * shape.group // config.block_m + num_requests
    fewer = min(tiles, num_requests * triton.cdiv(rows, config.block_m))
    if num_splits is None:
        idle = fewer * num_kv_heads < 2 * device.num_sms
        splits = (idle or rows <= 64) and max_keys > LEAST.value * config.block_n
        programs = device.num_sms * (PROGRAMS_PER_SM if config.block_m <= 32 else HIGH_PER_SM)
        num_splits = max(2, programs // num_kv_heads) if splits else 1
    return Plan(config, tiles if num_splits == 1 else fewer, num_splits)


def workspace_size(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    num_splits: int | None = None,
) -> int:
    """float32 elements of the workspace that `paged_attention` needs for these arguments."""
    found = _plan(q, k_cache, v_cache, block_table, max_seqlen_q, window, chunk, None, num_splits)[1]
    return found.workspace(k_cache.shape[2], v_cache.shape[3])[1]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_seqlen_q: int,
    scale: float,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the new tokens of R requests, whose keys and values are already in the cache.

    A request's query at position p sees keys up to p: all, those newer than p - `window`, or those of its own aligned
    `chunk`. Keys that no query of a tile sees are not loaded. Nothing is read back and grids depend on shapes alone, so
    calls can be captured, and replayed with other lengths and tables.

    Args:
        q: `[T, Hq, D]`, float32, bfloat16 or float16. Strides are free, here and below, but the last one is 1.
        k_cache: `[num_blocks, page, Hkv, D]` in q's dtype, or float8_e4m3fn.
        v_cache: `[num_blocks, page, Hkv, Dv]`, likewise.
        block_table: int32 `[R, B]`. Entries past a request's last page may be anything.
        cu_seqlens_q: int32 `[R + 1]`, where each request's tokens begin in q.
        seq_lens: int32 `[R]`, keys of each request with its new tokens.
        max_seqlen_q: at least the most new tokens of one request; chooses the size of tiles.
        scale: of the scores, above zero.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: `[Hq]`, one more score a query head, without a value.
        k_scale, v_scale: float32 `[1]` or `[Hkv]`, by which cached elements are multiplied.
        num_splits: 1 never cuts a request's keys in pieces; n > 1 makes about n pieces a KV head, in all; None chooses.
        workspace: float32 `[workspace_size(...)]` to use for partial results; allocated if None.
        out: `[T, Hq, Dv]` in q's dtype; allocated if None.

    Returns:
        `out`. Rows that belong to no request, or to one with seq_len 0, are left as they were (uninitialised if
        allocated here), and nothing is read for them.

    Raises:
        ValueError: arguments that do not fit together or are not supported.

    The ideas are FlashAttention's (online softmax, GQA packing), flash decoding's, and those of vLLM's unified kernel.
    """
    shape, found = _plan(q, k_cache, v_cache, block_table, max_seqlen_q, window, chunk, softcap, num_splits)
    _check(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, sinks, k_scale, v_scale)
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, num_requests = k_cache.shape[2], block_table.shape[0]
    if out is None:
        out = torch.empty(num_tokens, num_heads, shape.v_dim, dtype=q.dtype, device=q.device)
    elif out.shape != (num_tokens, num_heads, shape.v_dim) or out.stride(-1) != 1 or out.dtype != q.dtype:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}: give {q.dtype} {(*q.shape[:2], shape.v_dim)}")
    if num_tokens == 0 or num_requests == 0:
        return out
    if shape.kv_dtype != q.dtype and not _has_float8(q.device):
        k_cache, v_cache = k_cache.view(torch.int8), v_cache.view(torch.int8)
    cap = softcap or 0.0
    inputs = (
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
    )
    seen = (min(window or NONE, NONE), min(chunk or NONE, NONE))
    factors = (2 * LOG2_E * scale / cap, LOG2_E * cap) if cap else (1.0, LOG2_E * scale)
    strides = (
        *(q.stride(0), q.stride(1), out.stride(0), out.stride(1)),
        *(*k_cache.stride()[:3], *v_cache.stride()[:3]),
        0 if k_scale is None or k_scale.numel() == 1 else 1,
        0 if v_scale is None or v_scale.numel() == 1 else 1,
    )
    config, tiles = found.config, found.tiles
    options: dict[str, Any] = {**constexprs(shape, config), **config.options}
    with on(q.device):
        if found.num_splits == 1:
            unified_kernel[(tiles * num_kv_heads,)](
                out, *inputs, block_table.stride(0), *seen, *factors, *strides, **options
            )
            return out
        rows, size = found.workspace(num_kv_heads, shape.v_dim)
        if workspace is None:
            workspace = torch.empty(size, dtype=torch.float32, device=q.device)
        elif workspace.numel() < size or workspace.dtype != torch.float32:
            raise ValueError(f"workspace has {workspace.numel()} {workspace.dtype}: give {size} of torch.float32")
        partial, lse = workspace[: rows * shape.v_dim], workspace[rows * shape.v_dim :]
        split = (found.num_splits, block_table.stride(0), *seen)
        split_kernel[((found.num_splits + tiles) * num_kv_heads,)](
            out, partial, lse, *inputs, *split, *factors, *strides, **options
        )
        merge = merge_constexprs(shape, config)
        programs = num_tokens * num_kv_heads * triton.cdiv(shape.group, merge["HEADS"])
        tables = (cu_seqlens_q, seq_lens, num_requests, num_kv_heads, found.num_splits, *seen)
        merge_kernel[(programs,)](out, partial, lse, *tables, out.stride(0), out.stride(1), **merge)
    return out


def _plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    num_splits: int | None,
) -> tuple[Shape, Plan]:
    num_tokens, num_heads, dim = q.shape
    _, page, num_kv_heads, _ = k_cache.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    counts = dict(max_seqlen_q=max_seqlen_q, window=window, chunk=chunk, softcap=softcap, num_splits=num_splits)
    for name, value in counts.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}: it must be above zero, or None where it means nothing")
    shape = Shape(q.dtype, k_cache.dtype, dim, v_cache.shape[3], num_heads // num_kv_heads, page, bool(softcap))
    max_keys = min(block_table.shape[1] * page, (window or NONE) + max_seqlen_q, (chunk or NONE) + max_seqlen_q)
    sizes = (num_tokens, block_table.shape[0], num_kv_heads, max_seqlen_q, max_keys)
    return shape, plan(shape, device_facts(q.device), *sizes, num_splits)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"q is {q.dtype}: give float32, bfloat16 or float16")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype not in (q.dtype, torch.float8_e4m3fn) or x.dtype != k_cache.dtype:
            raise ValueError(f"{name} is {x.dtype}: give both caches in q's {q.dtype}, or in float8_e4m3fn")
    if k_cache.shape[3] != q.shape[2] or k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = tuple(q.shape), tuple(k_cache.shape), tuple(v_cache.shape)
        raise ValueError(f"q, k_cache and v_cache are {shapes}: D, blocks, page and KV heads must agree")
    if max(q.shape[2], v_cache.shape[3]) > MOST_DIM:
        raise ValueError(f"a head of {max(q.shape[2], v_cache.shape[3])} is larger than {MOST_DIM}")
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension: give 1 (contiguous rows)")
    num_requests = block_table.shape[0]
    tables = (("block_table", block_table, None), ("cu_seqlens_q", cu_seqlens_q, num_requests + 1))
    for name, x, length in (*tables, ("seq_lens", seq_lens, num_requests)):
        if x.dtype != torch.int32 or (length is not None and x.shape != (length,)):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: give int32 for {num_requests} requests")
    if scale <= 0:
        raise ValueError(f"scale is {scale}: it must be above zero")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks are {tuple(sinks.shape)}: give one for each of {q.shape[1]} query heads")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("only one of k_scale and v_scale is given: give both or neither")
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x is not None and (x.dtype != torch.float32 or x.numel() not in (1, k_cache.shape[2])):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: give float32, one or one a KV head")


def _has_float8(device: torch.device) -> bool:
    """Whether Triton knows e4m3 there; elsewhere the kernels take its bits apart."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
