"""What the GPU's backends share: the cache in pages `[num_blocks, block_size, Hkv, D]`, and a step's tensors.

Nothing here or in `attend` looks at lengths: launches depend on shapes and on the longest query, so that a captured
step of decodes can be replayed whatever its requests' lengths are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_cb.sizes import BLOCK_SIZE

if TYPE_CHECKING:
    from torch import Tensor

    from hf_cb.steps import GroupBatch, LayerFacts, StepBatch

HALVES = (torch.bfloat16, torch.float16)
MOST_DIM = 256  # of a head, in FlashAttention as in our own kernels


class Storage(NamedTuple):
    """One layer's cache: k `[num_blocks, block_size, Hkv, D]`, v `[..., Dv]`."""

    k: Tensor
    v: Tensor


@dataclass
class Meta:
    """A step's tensors on one device, as in StepBatch and GroupBatch.

    `cu_seqlens_k [R + 1]` int32, where a kernel wants the lengths summed up; `max_seqlen_k`: a bound by the block
    table's width.
    """

    slot_mapping: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_k: Tensor | None = None


class PagesBackend:
    """Everything but the attention itself. `sums_lengths`: whether that wants `Meta.cu_seqlens_k`."""

    device_types: frozenset[str] | None = frozenset({"cuda"})
    block_multiple = 1
    usual_block_size = BLOCK_SIZE
    clears = False  # scores beyond a request's length are replaced, and its values there are not read
    sums_lengths = False

    def kept_in(self, layer: LayerFacts) -> torch.dtype:
        """What the cache of a layer holds."""
        return layer.dtype

    def block_bytes(self, layer: LayerFacts, block_size: int) -> int:
        return layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) * block_size * self.kept_in(layer).itemsize

    def allocate(self, layer: LayerFacts, num_blocks: int, block_size: int) -> Storage:
        k, v = (
            torch.zeros(num_blocks, block_size, layer.num_kv_heads, dim, dtype=self.kept_in(layer), device=layer.device)
            for dim in (layer.head_dim, layer.v_head_dim)
        )
        return Storage(k, v)

    def graph_key(self, batch: StepBatch) -> Hashable:
        return max(batch.query_lens_list)

    def prepare(self, batch: StepBatch, group: GroupBatch, device: torch.device) -> Meta:
        seq_lens, block_table = batch.seq_lens.to(device), group.block_table.to(device)
        return Meta(
            slot_mapping=group.slot_mapping.to(device),
            block_table=block_table,
            cu_seqlens_q=batch.cu_seqlens_q.to(device),
            seq_lens=seq_lens,
            max_seqlen_q=max(batch.query_lens_list),
            max_seqlen_k=block_table.shape[1] * batch.block_size,
            cu_seqlens_k=F.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)) if self.sums_lengths else None,
        )

    def tensors(self, storage: Storage) -> list[Tensor]:
        return list(storage)

    def copy_blocks(self, storage: Storage, pairs: Tensor) -> None:
        source, target = pairs.to(storage.k.device).unbind(1)
        for cache in storage:
            rows = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # torch does less with fp8
            rows.index_copy_(0, target, rows.index_select(0, source))

    def clear_blocks(self, storage: Storage, blocks: Tensor) -> None:
        """Nothing to do."""


def store(storage: Storage, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """In PyTorch's own operators. Slots below zero write zeros to block 0, which holds nothing else."""
    nowhere = (slot_mapping < 0)[:, None, None]
    rows = slot_mapping.clamp(min=0)
    for cache, new in zip(storage, (k, v), strict=True):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, rows, new.masked_fill(nowhere, 0))


def with_rows(x: Tensor) -> Tensor:
    """With a contiguous last dimension, which is all that kernels ask for."""
    return x if x.stride(-1) == 1 else x.contiguous()


def problem_of_flash(layer: LayerFacts) -> str | None:
    """What keeps FlashAttention, in any version or wrapping, from computing a layer."""
    checks: list[tuple[Any, str]] = [
        (layer.device.type != "cuda", f"it computes on {layer.device}"),
        (layer.dtype not in HALVES, f"FlashAttention knows bfloat16 and float16, not {layer.dtype}"),
        (layer.has_sinks, "it has no attention sinks"),
        (layer.chunk is not None, "it has no attention in chunks"),
        (layer.v_head_dim != layer.head_dim, f"its values are as wide as its keys, not {layer.v_head_dim}"),
        (layer.head_dim > MOST_DIM, f"a head of {layer.head_dim} is larger than {MOST_DIM}"),
        (layer.head_dim % 8, f"a head of {layer.head_dim} is not a multiple of 8"),
        (layer.num_heads % layer.num_kv_heads, uneven_heads(layer)),
    ]
    return next((why for wrong, why in checks if wrong), None)


def uneven_heads(layer: LayerFacts) -> str:
    return f"{layer.num_heads} query heads are not a multiple of {layer.num_kv_heads} KV heads"
