"""Request-level batching, to compare with: a batch is formed, runs until its slowest request ends, and nobody joins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_cb.policies.base import Policy, Situation
from hf_cb.policies.checks import check_count, check_seconds

if TYPE_CHECKING:
    from hf_cb.core import Request


class Dynamic(Policy):
    """A batch of `batch_size` requests, or of those that are there `window` seconds after the first of them came,
    whichever is sooner (NVIDIA Triton's dynamic batcher).

    Args:
        batch_size: the most that one batch holds; as many as a step may hold if None.
        window: seconds.
    """

    name = "dynamic"

    def __init__(self, batch_size: int | None = None, window: float = 0.05) -> None:
        check_count(self.name, "batch_size", batch_size)
        check_seconds(self.name, "window", window)
        self.batch_size = batch_size
        self.window = window
        self._members: set[Request] = set()  # of batches that have begun, also those that have not started yet

    def order(self, situation: Situation) -> Iterable[Request]:
        members = [r for r in situation.waiting if r in self._members]
        if not members and not situation.running and self._may_begin(situation):
            members = list(situation.waiting[: self._size(situation)])
            self._members = {r for r in self._members if r.status.value != "finished"}.union(members)
        return [*situation.decodes_first(), *members]

    def wake_time(self, situation: Situation) -> float | None:
        return self._due(situation) if situation.waiting else None

    def _may_begin(self, situation: Situation) -> bool:
        waiting = situation.waiting
        if len(waiting) >= self._size(situation) or situation.closing:
            return True
        return bool(waiting) and situation.now >= self._due(situation)

    def _size(self, situation: Situation) -> int:
        return min(self.batch_size or situation.max_num_seqs, situation.max_num_seqs)

    def _due(self, situation: Situation) -> float:
        """When a batch begins though it is not full."""
        return min(r.created for r in situation.waiting) + self.window


class Static(Dynamic):
    """A batch of `batch_size` requests; of fewer only where no more can come, or none has come for a while.

    Args:
        batch_size: how many; as many as a step may hold if None.
        quiet: seconds without a new request after which a batch begins with those that are there: where requests come
            one by one nobody knows that no more will, and nothing may wait for ever.
    """

    name = "static"

    def __init__(self, batch_size: int | None = None, quiet: float = 1.0) -> None:
        super().__init__(batch_size)
        check_seconds(self.name, "quiet", quiet)
        self.quiet = quiet

    def _due(self, situation: Situation) -> float:
        return max(r.created for r in situation.waiting) + self.quiet
