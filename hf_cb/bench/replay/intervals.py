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


def positive_interval(by_round: np.ndarray, confidence: float, requests_too: bool = True) -> Interval:
    """`interval` of what cannot be negative: on a logarithmic scale, if it is never 0 either."""
    if not np.nanmin(by_round, initial=np.inf) > 0:
        return interval(by_round, confidence, requests_too)
    found = interval(np.log(by_round), confidence, requests_too)
    value = float(np.mean(by_round[:, 0]))
    if found.low is None or found.high is None:
        return Interval(value)
    return Interval(value, min(value, math.exp(found.low)), max(value, math.exp(found.high)))


def interval(by_round: np.ndarray, confidence: float, requests_too: bool = True, seed: int = 0) -> Interval:
    """The mean over rounds with its bounds.

    Args:
        by_round: `[rounds, 1 + draws]`, a figure in each round for each draw of requests, the first being all of them.
        requests_too: False: only the rounds tell how far it can be trusted; without a second round nothing does.
    """
    rounds, value = len(by_round), float(np.mean(by_round[:, 0]))
    if not np.isfinite(value) or (rounds < 2 and not requests_too):
        return Interval(value)
    drawn = np.zeros(1)
    if requests_too:
        means = by_round[:, 1:].mean(axis=0)
        drawn = means[np.isfinite(means)] - value
        if not len(drawn):
            return Interval(value)
    errors = np.tile(drawn, -(-DRAWS * TILES // len(drawn)))
    if rounds > 1:
        spread = float(np.std(by_round[:, 0], ddof=1)) / rounds**0.5
        errors = errors + spread * np.random.default_rng(seed).standard_t(rounds - 1, len(errors))
    tail = (1 - confidence) / 2
    low, high = np.quantile(errors, [tail, 1 - tail])
    return Interval(value, value + min(0.0, float(low)), value + max(0.0, float(high)))
