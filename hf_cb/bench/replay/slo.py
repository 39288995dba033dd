"""A service level objective: what each request is promised, and how many of them get it.

Goodput, the requests a second that were served as promised, is DistServe's measure (Zhong et al., OSDI 2024).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_cb.bench.report import percentile
from hf_cb.errors import OptionError

if TYPE_CHECKING:
    from hf_cb.bench.replay.turn import Served

TERMS = ("queue", "ttft", "itl", "itl_p50", "itl_p95", "itl_p99", "itl_max", "e2e")
SHARE = 0.9  # of all requests, for a setting to meet the objective; DistServe's


@dataclass(frozen=True)
class Slo:
    """Seconds that each request may take at most, by `TERMS`; and the share of requests for which that must be so.

    `itl` is the mean time between the tokens of a request, `itl_p95` the 95th percentile of its own.
    """

    limits: dict[str, float]
    share: float = SHARE

    @classmethod
    def parse(cls, text: str, share: float = SHARE) -> Slo:
        """`ttft=500ms,itl_p95=50ms`; OptionError names what is wrong."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9.]+(?:e-?[0-9]+)?)\s*(ms|s)\s*", part)
            if match is None:
                raise OptionError(f"--slo {text!r}: {part!r} must be a term and a time, such as ttft=500ms or e2e=10s.")
            name = match[1]
            if name not in TERMS:
                remedy = ""
                if name.partition("_")[0] in ("ttft", "e2e", "queue"):
                    remedy = " A request has one of these; which share of them must keep to it is --slo-share."
                raise OptionError(f"--slo {text!r}: {name} is unknown; the terms are {', '.join(TERMS)}.{remedy}")
            try:
                limits[name] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
            except ValueError:
                limits[name] = math.nan
            if not limits[name] > 0:
                raise OptionError(f"--slo {text!r}: {part!r} must be a positive time.")
        if not 0 < share <= 1:
            raise OptionError(f"--slo-share {share} must be above 0 and at most 1.")
        return cls(limits, share)

    def met_by(self, request: Served) -> bool:
        """Whether it was served, and as promised."""
        return request.done and all(value_of(request, name) <= limit for name, limit in self.limits.items())

    def __str__(self) -> str:
        return " and ".join(f"{name} <= {limit * 1e3:g} ms" for name, limit in self.limits.items())


def value_of(request: Served, term: str) -> float:
    """Seconds; 0 for the gaps of an answer that has none."""
    name, _, percent = term.partition("_")
    if name != "itl":
        return {"queue": request.queue_s, "ttft": request.ttft_s, "e2e": request.e2e_s}[name]
    if not request.gaps:
        return 0.0
    if not percent:
        return sum(request.gaps) / len(request.gaps)
    if percent == "max":
        return max(request.gaps)
    return percentile(request.gaps, float(percent[1:])) or 0.0
