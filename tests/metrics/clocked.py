"""An engine on a clock that only forwards move: 10 ms and 1 ms a token. What is said about time is exact then."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fake_runner import FakeRunner, make_engine, request

from hf_cb.core import Request
from hf_cb.engine.engine import Engine
from hf_cb.steps import StepBatch


class Clocked:
    """An engine, the time, and the requests that it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 1000.0
        self.extra = 0.0  # seconds that the next forward takes besides
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.engine: Engine = make_engine(clock=lambda: self.now, **options)
        runner = self.engine.runner
        assert isinstance(runner, FakeRunner)
        plain = runner.forward

        def forward(batch: StepBatch) -> Any:
            self.now += 0.01 + 0.001 * len(batch.input_ids) + self.extra
            self.extra = 0.0
            return plain(batch)

        runner.forward = forward

    def submit(self, name: str, prompt: int | list[int], new: int = 4, **options: Any) -> Request:
        ids = list(range(prompt)) if isinstance(prompt, int) else prompt
        added = request(name, ids, new, created=self.now, **options)
        self.engine.admit(added)
        return added

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()
