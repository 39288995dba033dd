"""Traces that nobody recorded: arrivals at random, evenly or in bursts, with lengths from a distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hf_cb.arrivals import Arrival, Trace
from hf_cb.errors import OptionError

KINDS = ("poisson", "bursty")
BURSTINESS = 3.0  # the coefficient of variation of the times between arrivals
FORMS = "N, uniform:LEAST:MOST or lognormal:MEDIAN:SIGMA"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, as it is written on the command line: `FORMS`."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises OptionError, naming what is wrong."""
        kind, *rest = text.split(":")
        try:
            numbers = [float(part) for part in (rest or [kind])]
        except ValueError:
            numbers = []
        if rest and kind == "uniform" and len(numbers) == 2 and 1 <= numbers[0] <= numbers[1] < math.inf:
            return cls(kind, *numbers)
        if rest and kind == "lognormal" and len(numbers) == 2 and 1 <= numbers[0] < math.inf and 0 < numbers[1] < 10:
            return cls(kind, *numbers)
        if not rest and len(numbers) == 1 and 1 <= numbers[0] < math.inf and numbers[0] == int(numbers[0]):
            return cls("fixed", numbers[0])
        raise OptionError(f"lengths {text!r} must be {FORMS}, of tokens from 1 up.")

    def draw(self, random: np.random.Generator, n: int) -> list[int]:
        """`n` whole numbers from 1 up."""
        if self.kind == "uniform":
            return random.integers(int(self.first), int(self.second), n, endpoint=True).tolist()
        if self.kind == "lognormal":
            drawn = random.lognormal(math.log(self.first), self.second, n)
            return np.clip(np.rint(drawn), 1, 2**31).astype(int).tolist()
        return [int(self.first)] * n


def generate(
    kind: str,
    rate: float,
    n: int,
    prompts: Lengths,
    outputs: Lengths,
    seed: int = 0,
    burstiness: float = BURSTINESS,
) -> Trace:
    """`n` requests, `rate` a second on average.

    Args:
        kind: "poisson": times between arrivals are exponential; "bursty": they are gamma distributed with
            `burstiness` as their coefficient of variation (1 is Poisson's), as in BurstGPT (Wang et al., 2024).

    Raises:
        OptionError: about an argument.
    """
    if kind not in KINDS:
        raise OptionError(f"The arrivals {kind!r} are unknown; there are {', '.join(KINDS)}.")
    if not 0 < rate < math.inf or n < 1:
        raise OptionError(f"rate={rate} must be a positive number of requests a second, and requests={n} at least 1.")
    if not 0 < burstiness < math.inf:
        raise OptionError(f"burstiness={burstiness} must be a positive number; 1 is Poisson's.")
    # three sequences of their own, so that changing the lengths leaves the times as they are
    times, of_prompts, of_outputs = (np.random.default_rng([seed, i]) for i in range(3))
    variation = 1.0 if kind == "poisson" else burstiness
    form = 1 / variation**2
    gaps = times.gamma(form, 1 / (rate * form), n)
    at = np.cumsum(gaps) - gaps[0]
    lengths = zip(at.tolist(), prompts.draw(of_prompts, n), outputs.draw(of_outputs, n), strict=True)
    return Trace(kind, tuple(Arrival(*row) for row in lengths))
