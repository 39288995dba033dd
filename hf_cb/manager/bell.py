"""What callers' threads wait on for news: Ctrl-C is a KeyboardInterrupt wherever it comes, and nothing stays locked.

A `threading.Condition` takes and gives back its lock in Python code: an interrupt there leaves the lock held for good,
or is answered with RuntimeError ("cannot release un-acquired lock").
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class Bell:
    """Rung after something has changed; whoever waits looks then whether it is what they wait for."""

    def __init__(self) -> None:
        self._ears: set[queue.SimpleQueue[None]] = set()  # of threads that wait

    def ring(self) -> None:
        """Wakes all who wait; takes no lock."""
        if self._ears:
            for ear in tuple(self._ears):
                ear.put(None)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `predicate` is true, for at most `timeout` seconds; what it says then."""
        end = None if timeout is None else time.monotonic() + timeout
        ear: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            self._ears.add(ear)  # before the first look: what comes after that look finds it
            while not predicate():
                left = threading.TIMEOUT_MAX if end is None else min(end - time.monotonic(), threading.TIMEOUT_MAX)
                if left <= 0:
                    return False
                try:
                    ear.get(timeout=left)
                except queue.Empty:
                    return predicate()
            return True
        finally:
            self._ears.discard(ear)
