"""How long busy Python threads may keep the interpreter to themselves while an engine steps.

Each small call of a step gives the interpreter's lock away, and then waits for it for up to the switch interval. With
one busy Python thread beside it and Python's own 5 ms, a step of SmolLM2-135M takes 180 times as long as with 0.1 ms
(docs/log.md). The interval belongs to the whole process, so it is shortened only while steps run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # a garbage collection inside may end up here again
_users: list[float] = []  # the intervals that are asked for now
_before = 0.0
_set = 0.0  # as Python has rounded it


@contextmanager
def switch_interval(seconds: float | None) -> Iterator[None]:
    """Inside, threads switch at least as often as this; the shortest of several wins. None changes nothing."""
    if seconds is None:
        yield
        return
    _enter(seconds)
    try:
        yield
    finally:
        _leave(seconds)


def _enter(seconds: float) -> None:
    global _before
    with _lock:
        if not _users or sys.getswitchinterval() != _set:  # nobody has set it, or somebody else has
            _before = sys.getswitchinterval()
        _users.append(seconds)
        _apply(min(_before, *_users))


def _leave(seconds: float) -> None:
    with _lock:
        _users.remove(seconds)
        if sys.getswitchinterval() == _set:  # else somebody has changed it meanwhile: theirs stays
            _apply(min([_before, *_users]))


def _apply(seconds: float) -> None:
    global _set
    sys.setswitchinterval(seconds)
    _set = sys.getswitchinterval()
