"""The figures of turns: percentiles of latencies, throughput and goodput, with intervals; and two settings compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from hf_cb.bench.replay.intervals import Interval, draw_requests, interval, joint_intervals, percentiles
from hf_cb.bench.replay.slo import Slo
from hf_cb.bench.replay.turn import OUTCOMES, Outcome, Served, Turn

LATENCIES = ("queue", "prefill", "ttft", "itl", "e2e")
PERCENTS = (50.0, 95.0, 99.0, 100.0)
NAMES = ("p50", "p95", "p99", "max")
CONFIDENCE = 0.95
# what settings are compared by. Few, since all of them must hold at once, and no far tails, which few requests tell
ROWS = ("ttft_p50", "ttft_p95", "itl_p95", "e2e_p50", "throughput")
HIGHER_IS_BETTER = ("throughput", "goodput")
FEW = 20  # values that a tail cannot be told from
TAIL = 5.0  # times the mean: a p99 beyond it is hidden by it


@dataclass
class Figures:
    """One setting, over all its rounds; seconds, tokens and requests a second.

    `latency` has for each of `LATENCIES` its `NAMES`; `mean` and `n` (values in a round) beside it.
    """

    latency: dict[str, dict[str, Interval]]
    mean: dict[str, float]
    n: dict[str, int]
    throughput: Interval
    goodput: Interval | None
    kept: float | None  # the share of requests that got what the SLO promises
    counts: dict[Outcome, int]
    preemptions: int
    cached_tokens: int
    late_s: float
    other_cores: float
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """One row of a comparison. `change`: b against a, as a share of a (0.1: ten percent more)."""

    name: str
    a: float
    b: float
    change: Interval

    @property
    def better(self) -> str | None:
        """ "a" or "b", where the whole interval says so."""
        low, high = self.change.low, self.change.high
        if low is None or high is None or low <= 0 <= high:
            return None
        return "b" if (low > 0) == (self.name in HIGHER_IS_BETTER) else "a"

    @property
    def faster_by(self) -> tuple[float, float] | None:
        """How much more the better one does in the same time, least and most, as shares of the other."""
        low, high = self.change.low, self.change.high
        if self.better is None or low is None or high is None:
            return None
        ratios = sorted(1 + bound for bound in (low, high))
        if (self.better == "b") == (self.name in HIGHER_IS_BETTER):
            return ratios[0] - 1, ratios[1] - 1
        return 1 / ratios[1] - 1, 1 / ratios[0] - 1


def values_of(request: Served, name: str) -> list[float]:
    """A request's values of a latency: one, its gaps for `itl`, or none where it has none."""
    if name == "itl":
        return request.gaps
    value: float = getattr(request, f"{name}_s")
    return [] if value != value else [value]


def describe(turns: Sequence[Turn], slo: Slo | None = None, confidence: float = CONFIDENCE) -> Figures:
    """The figures of one setting's turns, in order of rounds. Latencies are of the requests that were served."""
    counts = _draws(len(turns[0].requests))
    latency: dict[str, dict[str, Interval]] = {}
    mean, n = {}, {}
    for name in LATENCIES:
        found = np.stack([_percentiles(t, name, counts, PERCENTS, [r.done for r in t.requests]) for t in turns])
        # how far a maximum can be trusted, no bootstrap tells
        latency[name] = {
            label: interval(found[:, :, i], confidence, requests_too=label != "max") for i, label in enumerate(NAMES)
        }
        values = [v for t in turns for r in t.requests if r.done for v in values_of(r, name)]
        mean[name] = float(np.mean(values)) if values else float("nan")
        n[name] = len(values) // len(turns)
    figures = Figures(
        latency,
        mean,
        n,
        interval(np.array([[t.tokens / t.seconds] for t in turns]), confidence, requests_too=False),
        None if slo is None else interval(np.stack([_goodput(t, slo, counts) for t in turns]), confidence),
        None if slo is None else float(np.mean([slo.met_by(r) for t in turns for r in t.requests])),
        {outcome: sum(t.count(outcome) for t in turns) for outcome in OUTCOMES},
        sum(r.preemptions for t in turns for r in t.requests),
        sum(r.cached_tokens for t in turns for r in t.requests),
        max((r.late_s for t in turns for r in t.requests), default=0.0),
        max(t.other_cores for t in turns),
    )
    errors = (r.message for t in turns for r in t.requests if r.outcome == "error")
    figures.warnings = _warnings(figures, next(errors, ""))
    return figures


def compare(
    a: Sequence[Turn], b: Sequence[Turn], slo: Slo | None = None, confidence: float = CONFIDENCE
) -> list[Difference]:
    """Two settings' turns on the same requests, row by row; `confidence` is of all rows together.

    Latencies are paired: of the requests that both served in all rounds, with the same draws for both. Rounds are
    paired too, so what slowed one down for both does not count. One round alone gives no bounds.
    """
    rounds = min(len(a), len(b))
    turns = [*a[:rounds], *b[:rounds]]
    both = [all(t.requests[i].done for t in turns) for i in range(len(a[0].requests))]
    counts = _draws(len(both))
    rows: dict[str, Callable[[Turn], np.ndarray]] = {name: _row(name, counts, both) for name in ROWS}
    if slo is not None:
        rows["goodput"] = lambda turn: _goodput(turn, slo, counts)
    sides: list[tuple[str, float, float]] = []
    ratios: list[np.ndarray] = []
    for name, figure in rows.items():
        of_a, of_b = (np.stack([figure(t) for t in side[:rounds]]) for side in (a, b))
        whole = np.stack([of_a[:, 0], of_b[:, 0]])
        if not (np.isfinite(whole).all() and min(np.nanmin(of_a), np.nanmin(of_b)) > 0):
            continue  # nothing was served, or nothing as promised
        a_mean, b_mean = np.exp(np.log(whole).mean(axis=1)).tolist()
        sides.append((name, a_mean, b_mean))
        ratios.append(np.log(of_b / of_a)[:, : 1 if name == "throughput" else None])
    if rounds < 2:  # nothing tells what of it is the machine's doing
        ratios = [ratio[:, :1] for ratio in ratios]
    changes = joint_intervals(ratios, confidence) if ratios else []
    return [Difference(*side, _as_share(change)) for side, change in zip(sides, changes, strict=True)]


def _as_share(log_ratio: Interval) -> Interval:
    low, high = (None if bound is None else math.expm1(bound) for bound in (log_ratio.low, log_ratio.high))
    return Interval(math.expm1(log_ratio.value), low, high)


def _row(name: str, counts: np.ndarray, which: Sequence[bool]) -> Callable[[Turn], np.ndarray]:
    """From a turn to one figure for each draw of requests."""
    if name == "throughput":
        return lambda turn: np.full(len(counts), turn.tokens / turn.seconds)
    latency, _, percent = name.partition("_p")
    return lambda turn: _percentiles(turn, latency, counts, [float(percent)], which)[:, 0]


def _percentiles(
    turn: Turn, name: str, counts: np.ndarray, percents: Sequence[float], which: Sequence[bool]
) -> np.ndarray:
    pairs = [(v, i) for i, r in enumerate(turn.requests) if which[i] for v in values_of(r, name)]
    return percentiles([v for v, _ in pairs], [i for _, i in pairs], counts, percents)


def _goodput(turn: Turn, slo: Slo, counts: np.ndarray) -> np.ndarray:
    """Requests a second that were served as promised, for each draw of requests."""
    return counts @ np.array([slo.met_by(r) for r in turn.requests], dtype=float) / turn.seconds


@lru_cache(maxsize=4)
def _draws(n: int) -> np.ndarray:
    return draw_requests(n)


def _warnings(figures: Figures, first_error: str) -> list[str]:
    found = []
    for name in LATENCIES:
        p99, mean = figures.latency[name]["p99"].value, figures.mean[name]
        if figures.n[name] >= FEW and mean > 0 and p99 > TAIL * mean:
            found.append(
                f"the mean {name} of {mean * 1e3:.3g} ms hides a tail: 1 in 100 takes {p99 * 1e3:.3g} ms, "
                f"{p99 / mean:.0f} times that"
            )
    lost = {outcome: n for outcome, n in figures.counts.items() if outcome != "done" and n}
    if lost:
        words = ", ".join(f"{n} {outcome}" for outcome, n in lost.items())
        first = f" (the first error: {first_error})" if first_error else ""
        found.append(f"{words}{first}: the latencies are those of the other requests alone")
    if figures.other_cores > 0.1:
        found.append(f"other programs kept up to {figures.other_cores:.1f} cores busy: measure on a quiet machine")
    if figures.late_s > 0.05:
        found.append(f"a request was submitted {figures.late_s * 1e3:.0f} ms after it was due")
    return found
