"""What one turn of one setting left behind, request by request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["done", "rejected", "timeout", "error"]
OUTCOMES: tuple[Outcome, ...] = ("done", "rejected", "timeout", "error")
NAN = math.nan
DIGITS = 6  # of seconds, in a file


@dataclass
class Served:
    """One request; seconds since the turn began, or since its own arrival (`_s`); NaN where there is no such time.

    Time is counted from when a request was due, so that one which was submitted late waits no shorter. `queue_s` until
    it first ran, `prefill_s` from there to its first token, `ttft_s` both together, `gaps` between its tokens, `e2e_s`
    until its last.
    """

    due: float
    outcome: Outcome = "error"
    late_s: float = 0.0
    queue_s: float = NAN
    prefill_s: float = NAN
    ttft_s: float = NAN
    e2e_s: float = NAN
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    message: str = ""

    @property
    def done(self) -> bool:
        return self.outcome == "done"


@dataclass
class Turn:
    """One setting, once through the trace. `seconds`: until the last request had ended; `other_cores`: busy meanwhile
    with other programs; `steps` of the engine."""

    setting: str
    round: int
    seconds: float
    requests: list[Served]
    steps: int = 0
    other_cores: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.requests)

    def count(self, outcome: Outcome) -> int:
        return sum(r.outcome == outcome for r in self.requests)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: unknown is None."""
        return asdict(self) | {"requests": [_compact(asdict(r)) for r in self.requests]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Turn:
        """What `as_dict` gave."""
        rows: list[dict[str, Any]] = [{k: NAN if v is None else v for k, v in r.items()} for r in saved["requests"]]
        return cls(**{**saved, "requests": [Served(**row) for row in rows]})


def _compact(row: dict[str, Any]) -> dict[str, Any]:
    def value(given: Any) -> Any:
        if isinstance(given, list):
            return [value(v) for v in given]
        if isinstance(given, float):
            return None if math.isnan(given) else round(given, DIGITS)
        return given

    return {name: value(given) for name, given in row.items()}
