"""Attention over a paged KV cache in plain PyTorch: the definition that every other kernel is checked against.

Caches are `[num_blocks, Hkv, block_size, D]`, so that one head's keys of a block are one contiguous row and a block
table is gathered with a two-dimensional `index_select` (on a CPU 18 times as fast as gathering the 3-D view). The
G = Hq / Hkv query heads of a KV head share its keys as extra query rows: keys and values are never expanded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def store(cache: Tensor, new: Tensor, rows: Tensor) -> None:
    """Writes new `[T, Hkv, D]` to the rows `[T * Hkv]` (see `slot_rows`) of the cache."""
    cache.view(-1, cache.shape[-1]).index_copy_(0, rows, new.reshape(-1, cache.shape[-1]))


def slot_rows(slot_mapping: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """The cache's rows `[T * Hkv]` of T slots, where a slot is block * block_size + offset."""
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    heads = torch.arange(num_kv_heads, device=slot_mapping.device)
    return ((block[:, None] * num_kv_heads + heads) * block_size + offset[:, None]).flatten()


def table_rows(block_table: Tensor, num_kv_heads: int) -> Tensor:
    """For `gather`: block table `[R, B]` to the rows `[R * Hkv * B]` of the cache seen as one row a head and block."""
    heads = torch.arange(num_kv_heads, device=block_table.device)
    return (block_table.long()[:, None, :] * num_kv_heads + heads[None, :, None]).flatten()


def gather(cache: Tensor, rows: Tensor, num_requests: int) -> Tensor:
    """The keys or values of R requests from the cache: `[R, Hkv, B * block_size, D]`."""
    blocks, heads, block_size, dim = cache.shape
    found = cache.view(blocks * heads, block_size * dim).index_select(0, rows)
    return found.view(num_requests, heads, -1, dim)


def visible(query_pos: Tensor, key_pos: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """Which keys a query sees, by position: a boolean of the broadcast shape."""
    seen = key_pos <= query_pos
    if window is not None:
        seen = seen & (key_pos > query_pos - window)
    if chunk is not None:
        seen = seen & (key_pos // chunk == query_pos // chunk)
    return seen


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query a request. q `[R, Hq, D]`, k `[R, Hkv, L, D]`, v `[R, Hkv, L, Dv]`, bias `[R, 1, 1, L]` float32
    (0 or -inf), sinks `[Hq]`: returns `[R, Hq, Dv]`."""
    num_requests, num_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.reshape(num_requests, num_kv_heads, -1, dim)
    per_head = None if sinks is None else sinks.view(1, num_kv_heads, -1, 1)
    probs = _probabilities(torch.matmul(grouped, k.transpose(-1, -2)), bias, scale, softcap, per_head)
    return torch.matmul(probs.to(v.dtype), v).reshape(num_requests, num_heads, v.shape[-1])


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    first_key: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """T consecutive queries of one request, the first at position `start`. q `[T, Hq, D]`, k `[Hkv, L, D]`, v
    `[Hkv, L, Dv]` with keys from position `first_key` on: returns `[T, Hq, Dv]`."""
    num_queries, num_heads, dim = q.shape
    num_kv_heads, num_keys = k.shape[0], k.shape[1]
    group = num_heads // num_kv_heads
    grouped = q.reshape(num_queries, num_kv_heads, group, dim).permute(2, 1, 0, 3)  # [G, Hkv, T, D]
    plain_causal = start == first_key and window is None and chunk is None
    bias = None
    if not plain_causal or softcap is not None or sinks is not None:
        query_pos = torch.arange(start, start + num_queries, device=q.device)[:, None]
        key_pos = torch.arange(first_key, first_key + num_keys, device=q.device)[None]
        bias = visible(query_pos, key_pos, window, chunk)
    if softcap is None and sinks is None:
        k, v = k.expand(group, -1, -1, -1), v.expand(group, -1, -1, -1)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias, is_causal=bias is None, scale=scale)
    else:
        assert bias is not None
        additive = torch.zeros(bias.shape, device=q.device).masked_fill_(~bias, float("-inf"))
        per_head = None if sinks is None else sinks.view(num_kv_heads, group).t()[:, :, None, None]
        probs = _probabilities(torch.matmul(grouped, k.transpose(-1, -2)), additive, scale, softcap, per_head)
        out = torch.matmul(probs.to(v.dtype), v)
    return out.permute(2, 1, 0, 3).reshape(num_queries, num_heads, v.shape[-1])


def _probabilities(scores: Tensor, bias: Tensor, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax in float32; a sink is one more key with a learned score and no value (gpt-oss)."""
    scores = scores.float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
