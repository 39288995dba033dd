"""What callers' threads wait on for news: Ctrl-C is a KeyboardInterrupt wherever it comes, and nothing stays locked.

A `threading.Condition` takes and gives back its lock in Python code: an interrupt there leaves the lock held for good,
or is answered with RuntimeError ("cannot release un-acquired lock").
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Bell:
    """Rung after something has changed; whoever waits looks then whether it is what they wait for."""

    def __init__(self) -> None:
        self._ears: set[queue.SimpleQueue[None]] = set()  # of threads that wait

    def ring(self) -> None:
        """Wakes all who wait; takes no lock."""
        for ear in self._ears.copy():  # in one step, as tuple() is not: a garbage collection in it may run threads
            ear.put(None)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `predicate` is true, for at most `timeout` seconds; what it says then."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        ear: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            self._ears.add(ear)  # before the first look: what comes after that look finds it
            while not predicate():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                with suppress(queue.Empty):
                    ear.get(timeout=min(left, threading.TIMEOUT_MAX))
            return True
        finally:
            self._ears.discard(ear)
