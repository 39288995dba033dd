"""Work that a test runs to its end, holds in the middle, interrupts, or waits for."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hf_cb.core import Request
from hf_cb.engine.engine import Engine


def run_all(engine: Engine, requests: Sequence[Request]) -> None:
    """All of them, admitted in this order. None may fail, and nothing may be left behind."""
    for request in requests:
        engine.admit(request)
    while engine.has_work:
        engine.step()
    assert [request.exception for request in requests] == [None] * len(requests)
    engine.check_idle()


def held_after(engine: Engine, steps: int) -> threading.Event:
    """The engine makes so many steps, and the next one when the event is set: a test need not be faster than it."""
    step, made, may_go_on = engine.step, itertools.count(), threading.Event()

    def held() -> Any:
        if next(made) >= steps:
            assert may_go_on.wait(20)
        return step()

    engine.step = held  # type: ignore[method-assign]
    return may_go_on


def interrupted_after(times: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, in whose place KeyboardInterrupt comes once it was made so many times."""
    made = itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(made) >= times:
            raise KeyboardInterrupt
        return call(*args)

    return interrupted


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Whether it has become true in that time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(condition())
