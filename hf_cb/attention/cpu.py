"""The `cpu` backend: our own compiled kernels (`hf_cb.kernels.cpu`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hf_cb.kernels.cpu import library as lib
from hf_cb.kernels.cpu import paged_attention as op
from hf_cb.sizes import BLOCK_SIZE

if TYPE_CHECKING:
    from torch import Tensor

    from hf_cb.steps import GroupBatch, LayerFacts, StepBatch


@dataclass
class Storage:
    """One layer's cache, and how it is described to the kernels, for each kind of layer that uses it."""

    cache: op.Cache
    block_size: int
    layers: dict[LayerFacts, lib.Attention] = field(default_factory=dict)

    def describe(self, layer: LayerFacts, sinks: Tensor | None = None) -> lib.Attention:
        """The layer's part of a call, to be filled in; the caller keeps `sinks` (float32) alive."""
        found = self.layers.get(layer)
        if found is None:
            found = self.layers[layer] = op.describe(
                self.cache,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                layer.v_head_dim,
                self.block_size,
                layer.dtype,
                layer.scale,
                layer.window,
                layer.chunk,
                layer.softcap,
            )
        found.sinks = lib.pointer(sinks)
        return found


@dataclass
class Meta:
    """A step's tensors as the kernels take them."""

    slot_mapping: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor


class CpuBackend:
    """See the module's docstring; the methods are those of `AttentionBackend`.

    `kv_dtype`: "int8" for a quantised cache, None for one in the layers' own dtype.
    """

    name = "cpu"
    device_types: frozenset[str] | None = frozenset({"cpu"})
    block_multiple = 1
    usual_block_size = BLOCK_SIZE
    clears = False  # keys beyond a request's own are masked, and their values are never read

    def __init__(self, kv_dtype: str | None = None) -> None:
        self.kv_dtype = kv_dtype
        found = lib.library()
        self.table = found.best if found else None
        self.workspace = lib.Workspace(found) if found else None

    def missing(self) -> str | None:
        return f"hf_cb's compiled kernels are missing: {lib.problem()}" if self.table is None else None

    def unsupported(self, layer: LayerFacts) -> str | None:
        if layer.device.type != "cpu":
            return f"it computes on {layer.device}"
        if layer.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the kernels know float32, bfloat16 and float16, not {layer.dtype}"
        if max(layer.head_dim, layer.v_head_dim) > op.MOST_DIM:
            return f"a head of {max(layer.head_dim, layer.v_head_dim)} is larger than {op.MOST_DIM}"
        if layer.num_heads % layer.num_kv_heads:
            return f"{layer.num_heads} query heads are not a multiple of {layer.num_kv_heads} KV heads"
        return None

    def block_bytes(self, layer: LayerFacts, block_size: int) -> int:
        one = self.allocate(layer, 1, block_size).cache
        return sum(tensor.nbytes for tensor in one if tensor is not None)

    def allocate(self, layer: LayerFacts, num_blocks: int, block_size: int) -> Storage:
        shape = (layer.num_kv_heads, layer.head_dim, layer.v_head_dim, block_size)
        dtype = torch.int8 if self.kv_dtype == "int8" else layer.dtype
        return Storage(op.allocate(num_blocks, *shape, dtype), block_size)

    def graph_key(self, batch: StepBatch) -> Hashable:
        return None

    def prepare(self, batch: StepBatch, group: GroupBatch, device: torch.device) -> Meta:
        return Meta(group.slot_mapping, group.block_table, batch.cu_seqlens_q, batch.seq_lens)

    def attend(
        self, storage: Storage, layer: LayerFacts, q: Tensor, k: Tensor, v: Tensor, meta: Meta, sinks: Tensor | None
    ) -> Tensor:
        assert self.table is not None and self.workspace is not None
        if sinks is not None:
            sinks = sinks.float().contiguous()
        return op.paged_attention(
            self.table,
            self.workspace,
            storage.describe(layer, sinks),
            q,
            k,
            v,
            meta.slot_mapping,
            meta.block_table,
            meta.cu_seqlens_q,
            meta.seq_lens,
            torch.get_num_threads(),
        )

    def tensors(self, storage: Storage) -> list[Tensor]:
        return []

    def copy_blocks(self, storage: Storage, pairs: Tensor) -> None:
        for tensor in storage.cache:
            if tensor is not None:
                tensor[:, pairs[:, 1]] = tensor[:, pairs[:, 0]]

    def clear_blocks(self, storage: Storage, blocks: Tensor) -> None:
        """Nothing to do."""
