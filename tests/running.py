"""An engine with requests, run to the end without a manager."""

from __future__ import annotations

from collections.abc import Sequence

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
