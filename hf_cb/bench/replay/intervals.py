"""How far a figure can be trusted: intervals from resampled requests and from what differed between rounds.

A percentile of latencies has two kinds of uncertainty: other requests would have come out differently, and the same
requests come out differently in another round, since the machine is never twice the same. The first is told by a
bootstrap over requests (Efron, 1979), with all tokens of a request drawn together, and with the same draws for the
settings that are compared, so that what is hard about a request counts for both. The second is told by Student's t from
the figures of the rounds. An interval holds both: the distribution of the sum of the two errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 1000
TILES = 40  # draws of the rounds' error for each draw of requests
CELLS = 4_000_000  # numbers held at a time


@dataclass(frozen=True)
class Interval:
    """A figure and its bounds; bounds are None where nothing tells them."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_list(self) -> list[float | None]:
        """For JSON; NaN is None."""
        return [None if v is None or v != v else float(v) for v in (self.value, self.low, self.high)]


def draw_requests(n: int, draws: int = DRAWS, seed: int = 0) -> np.ndarray:
    """How often each of `n` requests is taken, `[1 + draws, n]`; the first row takes each of them once."""
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=draws)
    return np.concatenate([np.ones((1, n), dtype=drawn.dtype), drawn])


def percentiles(
    values: Sequence[float], owners: Sequence[int], counts: np.ndarray, percents: Sequence[float]
) -> np.ndarray:
    """For each row of counts, the smallest values that so many percent of all do not exceed: `[rows, percents]`.

    Args:
        values: any number for each request, or none.
        owners: whose they are.
        counts: `[rows, requests]`, how often each request is taken. A row that takes no value gives NaN.
    """
    found = np.full((len(counts), len(percents)), np.nan)
    if not len(values):
        return found
    order = np.argsort(values, kind="stable")
    ordered, owner = np.asarray(values, dtype=float)[order], np.asarray(owners)[order]
    chunk = max(1, CELLS // len(ordered))
    for begin in range(0, len(counts), chunk):
        upto = counts[begin : begin + chunk, owner].cumsum(axis=1)
        for column, percent in enumerate(percents):
            wanted = np.maximum(1, np.ceil(upto[:, -1] * (percent / 100) - 1e-9))
            at = (upto < wanted[:, None]).sum(axis=1)
            there = upto[:, -1] > 0
            found[begin : begin + chunk, column][there] = ordered[at[there]]
    return found


def interval(by_round: np.ndarray, confidence: float, requests_too: bool = True) -> Interval:
    """The mean over rounds with its bounds; all of it on a logarithmic scale if the figure is never 0, so that the
    ratio of two such means is the mean of the ratios.

    Args:
        by_round: `[rounds, 1 + draws]`, a figure in each round for each draw of requests, the first being all of them.
        requests_too: False: only the rounds tell how far it can be trusted; without a second round nothing does.
    """
    rows = by_round if requests_too else by_round[:, :1]
    if not np.nanmin(rows, initial=np.inf) > 0:
        return joint_intervals([rows], confidence)[0]
    (found,) = joint_intervals([np.log(rows)], confidence)
    low, high = (None if bound is None else math.exp(bound) for bound in (found.low, found.high))
    return Interval(math.exp(found.value), low, high)


def joint_intervals(figures: Sequence[np.ndarray], confidence: float, seed: int = 0) -> list[Interval]:
    """The means over rounds of several figures, with bounds that hold for all of them at once.

    Figures go up and down together, so the bounds are widened no more than they need to be (max-t: Hothorn, Bretz and
    Westfall, 2008): the errors of all figures are drawn together.

    Args:
        figures: each `[rounds, 1 + draws]`, or `[rounds, 1]` if only the rounds tell how far it can be trusted.
    """
    values = [float(np.mean(by_round[:, 0])) for by_round in figures]
    rounds, n = len(figures[0]), DRAWS * TILES
    random = np.random.default_rng(seed)
    normal, chi2 = random.standard_normal((n, rounds)), random.chisquare(max(1, rounds - 1), n)
    scaled = normal * (max(1, rounds - 1) / chi2 / (rounds * max(1, rounds - 1)))[:, None] ** 0.5
    tail = (1 - confidence) / 2
    bounds: list[tuple[float, float] | None] = []
    widest = np.zeros(n)
    for by_round, value in zip(figures, values, strict=True):
        means = by_round[:, 1:].mean(axis=0)
        drawn = means[np.isfinite(means)] - value
        if not np.isfinite(value) or (rounds < 2 and not len(drawn)):
            bounds.append(None)
            continue
        errors = scaled @ (by_round[:, 0] - value)  # Student's t with the spread of the rounds, shared by all figures
        if len(drawn):
            errors += np.resize(drawn, n)
        low, high = np.quantile(errors, [tail, 1 - tail])
        bounds.append((min(0.0, float(low)), max(0.0, float(high))))
        side = np.where(errors < 0, low, high)
        widest = np.maximum(widest, np.divide(errors, side, out=np.zeros(n), where=side != 0))
    factor = max(1.0, float(np.quantile(widest, confidence)))
    return [
        Interval(value) if bound is None else Interval(value, value + factor * bound[0], value + factor * bound[1])
        for value, bound in zip(values, bounds, strict=True)
    ]
