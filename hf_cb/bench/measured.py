"""What a run of an engine leaves behind, and what an engine is to the benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from hf_cb.bench.workload import Workload
from hf_cb.steps import StepRecord


class CannotRun(Exception):
    """An engine is not able to run this workload or model at all; the message says why. That is no failure."""


@dataclass
class Measured:
    """One run of one engine; times in seconds.

    `ttft` has for each request the time from its arrival to its first token, `itl` every gap between two tokens
    of the same request; both are empty where the engine does not tell. `tokens` has each request's output.
    `startup_s` is what it took to get ready before the clock, `peak_bytes` the most memory in the run, `others` the
    cores that other programs kept busy meanwhile. `problems` says what was not as ordered; `steps` is hf_cb's own
    trace; `about` is the version and the options of a peer.
    """

    engine: str
    output_tokens: int
    seconds: float
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    startup_s: float | None = None
    peak_bytes: int | None = None
    others: float | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def tok_s(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


class BenchEngine(Protocol):
    """Something that generates for a workload and measures itself."""

    name: str

    def run(self, workload: Workload) -> Measured: ...


def measured(
    engine: str,
    workload: Workload,
    tokens: Sequence[list[int]],
    seconds: float,
    errors: Sequence[str | None] | None = None,
) -> Measured:
    """A run's result, with a problem for each request that failed or has not as many tokens as ordered."""
    problems = []
    for i, (request, made) in enumerate(zip(workload.requests, tokens, strict=True)):
        error = errors[i] if errors else None
        if error is not None or len(made) != request.max_new:
            why = "" if error is None else f" ({error})"
            problems.append(f"request {i}: {len(made)} tokens instead of {request.max_new}{why}")
    return Measured(engine, sum(map(len, tokens)), seconds, problems=problems, tokens=list(tokens))


def latencies(workload: Workload, times: Iterable[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Times to the first token, and gaps between tokens; `times` has each token's, in seconds since the start."""
    ttft: list[float] = []
    itl: list[float] = []
    for request, of_request in zip(workload.requests, times, strict=True):
        ttft += [t - request.arrival for t in of_request[:1]]
        itl += [after - before for before, after in pairwise(of_request)]
    return ttft, itl
