"""How many prompt tokens a step may take while answers are running, so that the next tokens of these are in time.

The model is a straight line: a step takes `base` seconds, and so much more for each row that generates and for each
prompt token. It is fitted to the newest steps, with less weight for those that are far off (another program had the
processor), and pulled towards the last fit where the steps say nothing: no prompt may have come for a while.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from hf_cb.steps import StepRecord

UNBOUNDED = 2**30
NEWEST = 64  # steps that are looked at
FIRST_TOKENS = 64  # prompt tokens that are tried at first
GROWTH = 2  # times as many as the newest steps have had: the line is not trusted further out
LEAST_TOKENS = 16  # that prompts get in any case: nothing waits for ever
MARGIN = 0.9  # of the target: the rest is for what lies between steps, and for noise
SCALES = np.array([1.0, 16.0, 256.0])  # of the three: so that they are pulled alike
PULL = 0.01  # towards the last fit, against 1 for each step


class Pacing:
    """Watches steps, and says how much a prompt may hold up running answers.

    Args:
        target: seconds of a step with running answers; None: no bound.
    """

    def __init__(self, target: float | None = None) -> None:
        self.target = target
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=NEWEST)  # rows that generate, prompt tokens, seconds
        self._fit = np.zeros(3)  # seconds of a step, of each row, and of each prompt token, in SCALES
        self._is_stale = False
        self._ended = -math.inf  # the step before

    def observe(self, step: StepRecord, ended: float) -> None:
        """A step is over."""
        seconds = ended - max(step.started, self._ended)  # the step before it may still have been running
        self._steps.append((step.decode_tokens, step.prefill_tokens, seconds))
        self._is_stale, self._ended = True, ended

    def fastest_step(self) -> float:
        """Seconds of the fastest of the newest steps; 0 before the first."""
        return min((seconds for _, _, seconds in self._steps), default=0.0)

    def prompt_tokens(self, rows: int) -> int:
        """Most prompt tokens of a step with so many rows that generate."""
        if self.target is None:
            return UNBOUNDED
        base, per_row, per_token = self.seconds
        room = self.target * MARGIN - base - per_row * rows
        tried = max((tokens for _, tokens, _ in self._steps), default=0)
        most = max(FIRST_TOKENS, GROWTH * tried)
        return max(LEAST_TOKENS, int(min(max(0.0, room) / max(per_token, 1e-9), most)))

    @property
    def seconds(self) -> tuple[float, float, float]:
        """The model: seconds of a step, and more for each row that generates and for each prompt token."""
        if self._is_stale and self._steps:
            self._refit()
        base, per_row, per_token = (self._fit / SCALES).tolist()
        return base, per_row, per_token

    def _refit(self) -> None:
        """Least squares, repeated with less weight for what was far off (Huber's weights)."""
        self._is_stale = False
        steps = np.array(self._steps)
        seen, took = np.column_stack([np.ones(len(steps)), steps[:, :2]]) / SCALES, steps[:, 2]
        fit = _nearest(seen, took, np.ones(len(steps)), self._fit)
        for _ in range(3):
            off = np.abs(took - seen @ fit)
            usual = max(1.5 * float(np.median(off)), 1e-9)
            fit = _nearest(seen, took, np.minimum(1.0, usual / np.maximum(off, 1e-12)), self._fit)
        self._fit = fit


def _nearest(seen: np.ndarray, took: np.ndarray, weights: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Weighted least squares, pulled towards `before`."""
    weighted = seen * weights[:, None]
    fit = np.linalg.solve(weighted.T @ seen + PULL * np.eye(3), weighted.T @ took + PULL * before)
    return np.maximum(fit, 0.0)
