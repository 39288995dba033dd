"""KV blocks in the host's memory: a request that gives way may keep its keys there rather than compute them again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hf_cb.core import Request
from hf_cb.steps import NULL_BLOCK


@dataclass
class Saved:
    """One request's tables, with host blocks in place of the device's, and what they are good for."""

    tables: list[list[int | None]]  # None: a window has left it behind
    num_computed: int
    epoch: int
    regime: Hashable


class HostBlocks:
    """Which host blocks are whose. Knows no tensors: what is to be copied goes with the step's plan."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))  # so that they are taken in order
        self._released: list[int] = []
        self._saved: dict[Request, Saved] = {}

    def begin_step(self) -> None:
        """What earlier steps have read or given up may be written again: within a step, saving comes first."""
        self._free += self._released
        self._released.clear()

    def save(self, request: Request, block_size: int) -> list[tuple[int, int, int]]:
        """Takes host blocks for all that a request has computed: copies to make, `(group, block, host block)`. None are
        made, and nothing is saved, where too few are left."""
        held_tables = [table[: -(-request.num_computed // block_size)] for table in request.tables]
        held = sum(block != NULL_BLOCK for table in held_tables for block in table)
        if not request.num_computed or held > len(self._free):
            return []
        copies: list[tuple[int, int, int]] = []
        tables: list[list[int | None]] = []
        for group, table in enumerate(held_tables):
            tables.append([self._free.pop() if block != NULL_BLOCK else None for block in table])
            copies += [(group, block, to) for block, to in zip(table, tables[-1], strict=True) if to is not None]
        self._saved[request] = Saved(tables, request.num_computed, request.epoch, request.regime)
        return copies

    def of(self, request: Request) -> Saved | None:
        return self._saved.get(request)

    def drop(self, request: Request) -> None:
        """What is saved of a request is of no use any more."""
        saved = self._saved.pop(request, None)
        if saved is not None:
            self._released += [block for table in saved.tables for block in table if block is not None]

    def check_idle(self) -> None:
        """With no request alive, every block is free; AssertionError otherwise."""
        free = sorted(self._free + self._released)
        assert not self._saved and free == list(range(self.num_blocks)), f"{len(free)} of {self.num_blocks} host blocks"
