"""The `reference` backend: plain PyTorch on any device.

Decode rows are grouped by length and gathered by block table; prompt chunks run one request at a time. No score between
two requests is ever computed, and no mask over the concatenation is built.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from hf_cb.kernels.lazy_zeros import lazy_zeros
from hf_cb.kernels.reference import paged_attention as op
from hf_cb.sizes import BLOCK_SIZE
from hf_cb.steps import NULL_BLOCK

if TYPE_CHECKING:
    from torch import Tensor

    from hf_cb.steps import GroupBatch, LayerFacts, StepBatch


class Storage(NamedTuple):
    """One layer's cache: k `[num_blocks, Hkv, block_size, D]`, v `[..., Dv]`."""

    k: Tensor
    v: Tensor


@dataclass
class Bucket:
    """Decode rows of similar length: their query tokens, the cache rows to gather, and a bias over them."""

    tokens: Tensor  # [R]
    rows: Tensor  # [R * Hkv * B]
    bias: Tensor  # [R, 1, 1, B * block_size] float32


@dataclass
class Chunk:
    """One request's consecutive query tokens [begin, end), the first at position `start`."""

    begin: int
    end: int
    start: int
    first_key: int
    rows: Tensor | None  # None: the chunk's own keys are all there are


@dataclass
class View:
    """A step as the layers with the same head count and window see it."""

    slots: Tensor
    buckets: list[Bucket]
    chunks: list[Chunk]


@dataclass
class Meta:
    """A step on one device. Views are made when a layer first asks for one."""

    batch: StepBatch
    slot_mapping: Tensor
    block_table: Tensor
    starts: list[int]
    views: dict[tuple[int, int | None, int | None], View] = field(default_factory=dict)


class ReferenceBackend:
    """See the module's docstring; the methods are those of `AttentionBackend`."""

    name = "reference"
    device_types: frozenset[str] | None = None
    block_multiple = 1
    usual_block_size = BLOCK_SIZE
    clears = True

    def missing(self) -> str | None:
        return None

    def unsupported(self, layer: LayerFacts) -> str | None:
        if layer.num_heads % layer.num_kv_heads:
            return f"{layer.num_heads} query heads are not a multiple of {layer.num_kv_heads} KV heads"
        return None

    def block_bytes(self, layer: LayerFacts, block_size: int) -> int:
        return layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) * block_size * layer.dtype.itemsize

    def allocate(self, layer: LayerFacts, num_blocks: int, block_size: int) -> Storage:
        # nothing unwritten is a NaN
        k, v = (
            lazy_zeros(num_blocks, layer.num_kv_heads, block_size, dim, dtype=layer.dtype, device=layer.device)
            for dim in (layer.head_dim, layer.v_head_dim)
        )
        return Storage(k, v)

    def graph_key(self, batch: StepBatch) -> Hashable:
        return None  # it looks at lengths in Python

    def prepare(self, batch: StepBatch, group: GroupBatch, device: torch.device) -> Meta:
        starts = [s - q for s, q in zip(batch.seq_lens_list, batch.query_lens_list, strict=True)]
        return Meta(batch, group.slot_mapping.to(device), group.block_table.to(device), starts)

    def attend(
        self, storage: Storage, layer: LayerFacts, q: Tensor, k: Tensor, v: Tensor, meta: Meta, sinks: Tensor | None
    ) -> Tensor:
        view = _view(meta, layer)
        op.store(storage.k, k, view.slots)
        op.store(storage.v, v, view.slots)
        out = q.new_empty(q.shape[0], layer.num_heads, layer.v_head_dim)
        for bucket in view.buckets:
            keys = op.gather(storage.k, bucket.rows, len(bucket.tokens))
            values = op.gather(storage.v, bucket.rows, len(bucket.tokens))
            rows = q.index_select(0, bucket.tokens)
            found = op.decode_attention(rows, keys, values, bucket.bias, layer.scale, layer.softcap, sinks)
            out.index_copy_(0, bucket.tokens, found)
        for c in view.chunks:
            if c.rows is None:
                keys, values = k[c.begin : c.end].transpose(0, 1), v[c.begin : c.end].transpose(0, 1)
            else:
                num_keys = c.start + c.end - c.begin - c.first_key
                keys = op.gather(storage.k, c.rows, 1)[0, :, :num_keys]
                values = op.gather(storage.v, c.rows, 1)[0, :, :num_keys]
            out[c.begin : c.end] = op.chunk_attention(
                q[c.begin : c.end],
                keys,
                values,
                c.start,
                c.first_key,
                layer.scale,
                layer.window,
                layer.chunk,
                layer.softcap,
                sinks,
            )
        return out

    def tensors(self, storage: Storage) -> list[Tensor]:
        return list(storage)

    def copy_blocks(self, storage: Storage, pairs: Tensor) -> None:
        source, target = pairs.to(storage.k.device).unbind(1)
        for cache in storage:
            cache.index_copy_(0, target, cache.index_select(0, source))

    def clear_blocks(self, storage: Storage, blocks: Tensor) -> None:
        # a decode row reads whole blocks: what is past its end has weight zero, and zero times an old NaN is NaN
        for cache in storage:
            cache.index_fill_(0, blocks.to(cache.device), 0)


def _view(meta: Meta, layer: LayerFacts) -> View:
    key = (layer.num_kv_heads, layer.window, layer.chunk)
    view = meta.views.get(key)
    if view is None:
        view = meta.views[key] = _make_view(meta, *key)
    return view


def _make_view(meta: Meta, num_kv_heads: int, window: int | None, chunk: int | None) -> View:
    batch, block_size = meta.batch, meta.batch.block_size
    decode: list[tuple[int, int, int]] = []  # (request, query token, first block)
    chunks: list[Chunk] = []
    begin = 0
    for r, (count, start) in enumerate(zip(batch.query_lens_list, meta.starts, strict=True)):
        first_block = _first_key(start, window, chunk) // block_size
        if count == 1:
            decode.append((r, begin, first_block))
        else:
            rows = None
            if start:
                last_block = -(-(start + count) // block_size)
                rows = op.table_rows(meta.block_table[r : r + 1, first_block:last_block], num_kv_heads)
            first_key = first_block * block_size if start else 0
            chunks.append(Chunk(begin, begin + count, start, first_key, rows))
        begin += count
    slots = op.slot_rows(meta.slot_mapping, num_kv_heads, block_size)
    buckets = [_bucket(meta, rows, num_kv_heads, window, chunk) for rows in _by_length(decode, batch, block_size)]
    return View(slots, buckets, chunks)


def _first_key(position: int, window: int | None, chunk: int | None) -> int:
    """The oldest key that a query at `position` sees."""
    first = 0
    if window is not None:
        first = max(first, position - window + 1)
    if chunk is not None:
        first = max(first, position // chunk * chunk)
    return first


def _by_length(
    decode: list[tuple[int, int, int]], batch: StepBatch, block_size: int
) -> list[list[tuple[int, int, int]]]:
    """Rows in buckets whose padding stays below a quarter of their content: padding costs bandwidth, buckets calls."""

    def blocks(row: tuple[int, int, int]) -> int:
        return -(-batch.seq_lens_list[row[0]] // block_size) - row[2]

    buckets: list[list[tuple[int, int, int]]] = []
    longest = content = waste = 0
    for row in sorted(decode, key=blocks, reverse=True):
        size = blocks(row)
        if not buckets or waste + longest - size > max(16, content // 4):
            buckets.append([])
            longest, content, waste = size, 0, 0
        buckets[-1].append(row)
        content, waste = content + size, waste + longest - size
    return buckets


def _bucket(
    meta: Meta, rows: list[tuple[int, int, int]], num_kv_heads: int, window: int | None, chunk: int | None
) -> Bucket:
    block_size, device = meta.batch.block_size, meta.block_table.device
    requests, tokens, first_blocks = torch.tensor(rows, device=device).unbind(1)
    last_positions = torch.tensor([meta.batch.seq_lens_list[r] - 1 for r, _, _ in rows], device=device)
    width = int((last_positions // block_size - first_blocks).max()) + 1
    columns = first_blocks[:, None] + torch.arange(width, device=device)
    inside = columns <= (last_positions // block_size)[:, None]
    table = meta.block_table.long()[requests].gather(1, columns.clamp(max=meta.block_table.shape[1] - 1))
    table = torch.where(inside, table, NULL_BLOCK)
    key_pos = first_blocks[:, None] * block_size + torch.arange(width * block_size, device=device)
    seen = op.visible(last_positions[:, None], key_pos, window, chunk)
    bias = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))
    return Bucket(tokens, op.table_rows(table, num_kv_heads), bias[:, None, None])
