"""Runs engines on a workload, turn by turn, and compares them round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import transformers

from hf_cb.bench.measured import BenchEngine, CannotRun, Measured
from hf_cb.bench.others import OtherWork
from hf_cb.bench.workload import Workload

OURS = "hf_cb"
AGREED = 0.5  # of the first tokens must be the same: far above chance, and far below what rounding alone does


@dataclass
class BenchResult:
    """All rounds of all engines. One that raised is in `failed`, with why, and keeps earlier rounds.

    One that is not made for this workload or model is in `unable`, with why. `interrupted`: after which round.
    """

    workload: Workload
    rounds: dict[str, list[Measured]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unable: dict[str, str] = field(default_factory=dict)
    interrupted: str | None = None

    @property
    def problems(self) -> list[str]:
        """An interrupt, failures, and results that were not as ordered."""
        found = [self.interrupted] if self.interrupted else []
        found += [f"{name} failed: {message}" for name, message in self.failed.items()]
        for name, runs in self.rounds.items():
            found += [f"{name}, round {i + 1}: {p}" for i, run in enumerate(runs) for p in run.problems]
            agreed = self.agreed(name)
            if agreed is not None and agreed < AGREED:
                found.append(f"{name}: only {agreed:.0%} of its first tokens are {OURS}'s: is it the same model?")
        return found

    def agreed(self, engine: str) -> float | None:
        """The share of requests with the same first token as hf_cb's; later ones differ by rounding soon enough."""
        if engine == OURS or OURS not in self.rounds:
            return None
        pairs = list(zip(self.rounds[OURS][0].tokens, self.rounds[engine][0].tokens, strict=False))
        return statistics.fmean(ours[:1] == theirs[:1] for ours, theirs in pairs) if pairs else None

    def tok_s(self, engine: str) -> float:
        """Output tokens per second, median of the rounds."""
        return statistics.median(run.tok_s for run in self.rounds[engine])

    def ratio(self, engine: str, peer: str) -> float:
        """How many times as fast as the peer: the median of each round's ratio."""
        pairs = zip(self.rounds[engine], self.rounds[peer], strict=False)
        return statistics.median(ours.tok_s / theirs.tok_s for ours, theirs in pairs)


def run_engines(
    engines: Sequence[BenchEngine],
    workload: Workload,
    repeat: int = 1,
    on_run: Callable[[Measured], None] | None = None,
) -> BenchResult:
    """Warms up each engine, then runs all of them `repeat` times, every other round in reverse order.

    KeyboardInterrupt in the first round is raised; a later one ends the benchmark with the rounds before.

    Args:
        on_run: called after each measured run.

    Engines with a `close` are not closed: their processes are the caller's to end.
    """
    result = BenchResult(workload)
    with _quiet_transformers():
        for engine in engines:
            _attempt(result, engine, workload.warm_up())
        for i in range(repeat):
            try:
                _round(result, engines if i % 2 == 0 else engines[::-1], on_run)
            except KeyboardInterrupt:
                if i == 0:
                    raise
                result.rounds = {name: runs[:i] for name, runs in result.rounds.items()}
                result.interrupted = cut_short(i, repeat)
                break
    return result


def cut_short(done: int, repeat: int) -> str:
    """What is said of a measurement that was interrupted after so many rounds."""
    return f"interrupted: {done} of {repeat} rounds were finished, and no others are told of"


def _round(result: BenchResult, engines: Sequence[BenchEngine], on_run: Callable[[Measured], None] | None) -> None:
    for engine in engines:
        measured = _attempt(result, engine, result.workload)
        if measured is not None:
            result.rounds.setdefault(engine.name, []).append(measured)
            if on_run is not None:
                on_run(measured)


def _attempt(result: BenchResult, engine: BenchEngine, workload: Workload) -> Measured | None:
    """A run, or None if the engine raises or has raised before: the others are still worth measuring."""
    if engine.name in result.failed or engine.name in result.unable:
        return None
    others = OtherWork()
    try:
        measured = engine.run(workload)
    except CannotRun as error:
        result.unable[engine.name] = str(error)
        return None
    except Exception as error:
        result.failed[engine.name] = f"{type(error).__name__}: {error}"
        return None
    measured.others = others.cores()
    return measured


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """It warns about `eos_token_id=-1` in every call."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
