"""FlashAttention's paged functions with their real signatures, checks and conventions, computed in plain PyTorch.

Signatures and conventions are those of flash-attention at 0251105 (2.8.4; `hopper/`; `flash_attn/cute`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float,
) -> Tensor:
    """Query i of a request sees keys from i + keys - queries - left to i + keys - queries + right; None: no bound."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=q.dtype)
    group = q.shape[1] // k.shape[2]
    for r, length in enumerate(seq_lens.tolist()):
        begin, end = cu_seqlens_q[r : r + 2].tolist()
        pages = table[r, : -(-length // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:length].repeat_interleave(group, 1).double() for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(length - (end - begin), length)[:, None]
        away = torch.arange(length)[None] - own
        hidden = torch.zeros(away.shape, dtype=torch.bool)
        if left is not None:
            hidden |= away < -left
        if right is not None:
            hidden |= away > right
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, table: Tensor, *ints: Tensor) -> None:
    assert q.dtype == k.dtype == v.dtype and q.shape[2] == k.shape[3] == v.shape[3] <= 256 and q.shape[2] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v, table))
    assert all(x.dtype == torch.int32 for x in (table, *ints)) and all(x.is_contiguous() for x in ints)


def _bounds(
    causal: bool, window_size: tuple[int | None, int | None], none: int | None
) -> tuple[int | None, int | None]:
    left, right = (None if x == none else x for x in window_size)
    return left, 0 if causal else right


def flash_attn_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert block_table is not None and softmax_scale is not None and k.shape[1] % 256 == 0
    _check(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_k.diff()
    assert cu_seqlens_k[0] == 0 and cu_seqlens_k.shape == cu_seqlens_q.shape
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q and int(lengths.max()) <= max_seqlen_k
    bounds = _bounds(causal, window_size, -1)
    return attend(q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, *bounds, softcap)


def flash_attn_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    assert page_table is not None and cache_seqlens is not None and cu_seqlens_q is not None and softmax_scale
    _check(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens)
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    bounds = _bounds(causal, window_size, -1)
    return attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, *bounds, softcap)


def flash_attn_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Any = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Any = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    assert page_table is not None and seqused_k is not None and cu_seqlens_q is not None and softmax_scale
    assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
    _check(q, k, v, page_table, cu_seqlens_q, seqused_k)
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q and int(seqused_k.max()) <= max_seqlen_k
    bounds = _bounds(causal, window_size, None)
    return attend(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, *bounds, softcap), None


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """PyTorch 2.13's, where (-1, 0) is causal and right bounds are given, not implied."""
    assert block_table is not None and seqused_k is not None and cu_seq_k is not None and scale is not None
    _check(query, key, value, block_table, cu_seq_q, cu_seq_k, seqused_k)
    assert key.shape[1] % 256 == 0 and enable_gqa == (query.shape[1] != key.shape[2]) and num_splits is None
    assert torch.equal(cu_seq_k.diff(), seqused_k)
    assert int(cu_seq_q.diff().max()) == max_q and int(seqused_k.max()) <= max_k
    bounds = _bounds(False, window_size, -1)
    return attend(query, key, value, cu_seq_q, seqused_k, block_table, scale, *bounds, 0.0)
