"""Layers in groups that share a block table, and the storages that the groups take turns in.

All groups draw block ids from one pool, and an id belongs to one group at a time: so layer j of every group can use the
same storage, and the memory goes to whichever kind of layer needs it (vLLM's hybrid KV cache manager).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_cb.steps import LayerFacts

MAX_GROUPS_OF_A_KIND = 6  # each group costs a table and a slot mapping per step


@dataclass(frozen=True)
class LayerGroup:
    """Layers (by index) that see the same keys; `storages[i]` is where layer `layers[i]` keeps its own."""

    layers: tuple[int, ...]
    storages: tuple[int, ...]
    window: int | None = None
    chunk: int | None = None

    def oldest_needed(self, position: int) -> int:
        """The oldest key that a query at `position` or later can see."""
        oldest = 0
        if self.window is not None:
            oldest = max(oldest, position - self.window + 1)
        if self.chunk is not None:
            oldest = max(oldest, position // self.chunk * self.chunk)
        return oldest

    def max_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Most blocks that a request of `num_tokens` holds at once if a step computes at most `step_tokens`."""
        whole = -(-num_tokens // block_size)
        reach = self.window if self.window is not None else self.chunk
        if reach is None:
            return whole
        return min(whole, -(-(reach - 1 + min(step_tokens, num_tokens)) // block_size) + 1)


def group_layers(layers: Sequence[LayerFacts], max_model_len: int) -> list[LayerGroup]:
    """A window or chunk that no request can outgrow counts as full attention."""
    by_shape: dict[tuple, dict[tuple, list[int]]] = {}
    for i, layer in enumerate(layers):
        window = layer.window if layer.window is not None and layer.window < max_model_len else None
        chunk = layer.chunk if layer.chunk is not None and layer.chunk < max_model_len else None
        by_shape.setdefault(layer.kv_shape, {}).setdefault((window, chunk), []).append(i)
    groups: list[LayerGroup] = []
    first_storage = 0
    for kinds in by_shape.values():
        counts = [len(members) for members in kinds.values()]
        size = max(min(counts), -(-max(counts) // MAX_GROUPS_OF_A_KIND))
        for (window, chunk), members in kinds.items():
            for at in range(0, len(members), size):
                part = tuple(members[at : at + size])
                storages = tuple(range(first_storage, first_storage + len(part)))
                groups.append(LayerGroup(part, storages, window, chunk))
        first_storage += size
    return groups


def storage_layers(groups: Sequence[LayerGroup]) -> list[int]:
    """For each storage one layer that uses it, whose facts give its shape."""
    first: dict[int, int] = {}
    for group in groups:
        for storage, layer in zip(group.storages, group.layers, strict=True):
            first.setdefault(storage, layer)
    return [first[s] for s in sorted(first)]
