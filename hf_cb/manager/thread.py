"""What a loop's thread runs, outside of the loop, so that it keeps nothing alive while it waits."""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import nn

from hf_cb.attention import interception
from hf_cb.core import Request, Update
from hf_cb.manager.training_mode import leave_eval

Deliver = Callable[[list[Update], BaseException | None], None]
Cancel = Callable[[list[Request]], None]


class Loop(Protocol):
    def work(self) -> float | None: ...


_here = threading.local()


def in_generation_thread() -> bool:
    """Whether this is the thread of a loop, of whatever manager: where nobody may wait for a request."""
    return getattr(_here, "runs_a_loop", False)


def nobody(*_: object) -> None:
    """Hears nothing: in place of who is told, once there is nothing more to tell."""


def run_while_alive(
    reference: weakref.ref[Loop], model: weakref.ref[nn.Module], news: queue.SimpleQueue[object], num_threads: int
) -> None:
    """The thread. While it waits it holds no loop, so that one that everybody has forgotten can go, with its model."""
    _here.runs_a_loop = True
    torch.set_num_threads(num_threads)  # OpenMP keeps its settings by thread
    while True:
        loop = reference()
        if loop is None:
            leave(model(), threading.current_thread())
            return
        wait = loop.work()
        if wait is None:
            return
        del loop
        with suppress(queue.Empty):
            news.get(timeout=None if wait == math.inf else wait)


def leave(model: nn.Module | None, thread: threading.Thread) -> None:
    """Undoes what `start` did for this thread."""
    try:
        if model is not None:
            leave_eval(model, thread)
    finally:
        interception.uninstall(thread)
