"""The loops that run in this process: they end before it does, and one may hear of it when they have stopped."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from hf_cb.manager.loop import EngineLoop

EXIT_TIMEOUT_S = 10.0
_lock = threading.RLock()
_running: weakref.WeakSet[EngineLoop] = weakref.WeakSet()
_awaited: set[EngineLoop] = set()  # somebody is to hear of their end, so that they must not just go


def note_running(loop: EngineLoop) -> None:
    """It is to be stopped before the interpreter goes."""
    with _lock:
        _running.add(loop)


def note_ended(loop: EngineLoop) -> None:
    """It needs no stopping any more."""
    with _lock:
        _running.discard(loop)


def _loops() -> list[EngineLoop]:
    with _lock:
        return list(_running)


def after_stopping(model: nn.Module, call: Callable[[], None]) -> None:
    """Calls `call` once no loop of this model that was told to stop takes a step any more: now, or in its thread."""
    for loop in [each for each in _loops() if each.model is model]:
        _awaited.add(loop)
        if loop.at_end(partial(_stopped, loop, call)):
            return
        _awaited.discard(loop)
    call()


def _stopped(loop: EngineLoop, call: Callable[[], None]) -> None:
    _awaited.discard(loop)
    after_stopping(loop.model, call)  # perhaps there are others


def _stop_all() -> None:
    """A thread that is in the middle of a forward while the interpreter goes away takes the process down with it."""
    loops = [loop for loop in _loops() if loop.is_running]
    for loop in loops:
        loop.abandon_pauses()
        loop.stop(hard=True)
    for loop in loops:
        loop.join(EXIT_TIMEOUT_S)


# atexit would come too late: the interpreter waits for other threads first, and those may wait for us
threading._register_atexit(_stop_all)  # type: ignore[attr-defined]
