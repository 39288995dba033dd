"""Several backends for one model: each kind of layer has its own."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_cb.attention.backend import AttentionBackend

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hf_cb.steps import GroupBatch, LayerFacts, StepBatch


class Storage(NamedTuple):
    """One backend's storage, and whose it is."""

    backend: AttentionBackend
    own: Any


@dataclass
class Meta:
    """A step of a group on a device. A backend prepares it when its first layer asks for it."""

    batch: StepBatch
    group: GroupBatch
    device: torch.device
    prepared: dict[str, Any] = field(default_factory=dict)

    def of(self, backend: AttentionBackend) -> Any:
        if backend.name not in self.prepared:
            self.prepared[backend.name] = backend.prepare(self.batch, self.group, self.device)
        return self.prepared[backend.name]


class SeveralBackends:
    """The methods are those of `AttentionBackend`; `of_shape` names the backend of all layers of a `kv_shape`.

    Layers of one shape may take turns in a storage (`models.groups`), so they have one backend.
    """

    device_types: frozenset[str] | None = None

    def __init__(self, of_shape: Mapping[tuple[Any, ...], AttentionBackend]) -> None:
        self.of_shape = dict(of_shape)
        self.parts = list({backend.name: backend for backend in of_shape.values()}.values())
        self.name = "+".join(backend.name for backend in self.parts)
        self.clears = any(backend.clears for backend in self.parts)
        self.block_multiple = math.lcm(*(backend.block_multiple for backend in self.parts))
        wished = max(backend.usual_block_size for backend in self.parts)
        self.usual_block_size = -(-wished // self.block_multiple) * self.block_multiple

    def missing(self) -> str | None:
        return next((why for backend in self.parts if (why := backend.missing()) is not None), None)

    def unsupported(self, layer: LayerFacts) -> str | None:
        backend = self.of_shape.get(layer.kv_shape)
        return backend.unsupported(layer) if backend is not None else f"no backend was chosen for {layer.kv_shape}"

    def block_bytes(self, layer: LayerFacts, block_size: int) -> int:
        return self.of_shape[layer.kv_shape].block_bytes(layer, block_size)

    def allocate(self, layer: LayerFacts, num_blocks: int, block_size: int) -> Storage:
        backend = self.of_shape[layer.kv_shape]
        return Storage(backend, backend.allocate(layer, num_blocks, block_size))

    def graph_key(self, batch: StepBatch) -> Hashable:
        keys = tuple(backend.graph_key(batch) for backend in self.parts)
        return None if None in keys else keys

    def prepare(self, batch: StepBatch, group: GroupBatch, device: torch.device) -> Meta:
        return Meta(batch, group, device)

    def attend(
        self, storage: Storage, layer: LayerFacts, q: Tensor, k: Tensor, v: Tensor, meta: Meta, sinks: Tensor | None
    ) -> Tensor:
        return storage.backend.attend(storage.own, layer, q, k, v, meta.of(storage.backend), sinks)

    def tensors(self, storage: Storage) -> list[Tensor]:
        return storage.backend.tensors(storage.own)

    def copy_blocks(self, storage: Storage, pairs: Tensor) -> None:
        storage.backend.copy_blocks(storage.own, pairs)

    def clear_blocks(self, storage: Storage, blocks: Tensor) -> None:
        storage.backend.clear_blocks(storage.own, blocks)
