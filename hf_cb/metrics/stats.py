"""A manager's state in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ManagerStats:
    """How things stand now: requests by state, KV blocks by state, and totals since the manager was made."""

    running: int
    waiting: int
    finished: int
    blocks_held: int
    blocks_cached: int
    blocks: int
    steps: int
    tokens: int
    preemptions: int
