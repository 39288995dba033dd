"""What a manager tells of itself: numbers, steps, a panel, and where a request's time went."""

from __future__ import annotations

import time

from hf_cb.core import GenerationOutput, Request
from hf_cb.engine.engine import Engine
from hf_cb.manager.display import EngineDisplay
from hf_cb.manager.loop import EngineLoop
from hf_cb.manager.registry import Registry
from hf_cb.metrics.stats import ManagerStats
from hf_cb.metrics.why import why
from hf_cb.steps import StepRecord


class Showing:
    """Mixed into the manager, which has the rest."""

    engine: Engine
    loop: EngineLoop
    registry: Registry

    def stats(self) -> ManagerStats:
        """A snapshot; taken without stopping the thread, so its figures may be one step apart."""
        pool, running = self.engine.kv.pool, len(self.engine.scheduler.running)
        return ManagerStats(
            running=running,
            waiting=max(0, len(self.registry) - running),
            finished=self.registry.finished,
            blocks_held=pool.num_held,
            blocks_cached=pool.num_cached,
            blocks=pool.num_blocks,
            steps=self.engine.num_steps,
            tokens=self.registry.tokens,
            preemptions=self.engine.scheduler.preemptions,
        )

    def trace(self) -> list[StepRecord]:
        """The newest StepRecords (`trace_steps` of them), oldest first."""
        while True:
            try:
                return list(self.engine.records)
            except RuntimeError:  # a collection of garbage in the middle let a step's end in
                continue

    def _why(self, request: Request, output: GenerationOutput | None) -> str:
        ended = output.lifespan[1] if output is not None else time.perf_counter()
        error = output.exception if output is not None else None
        return why(request, self.trace(), ended, self.engine.scheduler.policy, error)

    def display(self) -> EngineDisplay:
        """Shows the engine in a notebook, updated in place while it runs; `stop()` on what is returned ends that.

        Raises:
            OptionError: IPython is not installed.
        """
        return EngineDisplay(self)
