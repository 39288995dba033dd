"""From a ring of StepRecords to the reasons why one request had to wait."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from hf_cb.steps import Share, StepRecord

BREATH_S = 0.01  # between two steps of a busy engine: results are handed out, messages are read
NOTICED = 0.5  # a gap between tokens is a stall if it is longer than usual by this share,
STALL_S = 0.005  # and by so much
PHASES = ("plan", "build", "forward", "sample", "commit")


@dataclass
class Wait:
    """Seconds spent waiting by cause, and for each the last step that shows it."""

    seconds: Counter[str] = field(default_factory=Counter)
    shown_by: dict[str, StepRecord] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.seconds.total()

    def add(self, cause: str, seconds: float, record: StepRecord | None = None) -> None:
        self.seconds[cause] += seconds  # type: ignore[assignment]  # a Counter of floats
        if record is not None:
            self.shown_by[cause] = record

    def merge(self, other: Wait) -> None:
        for cause, seconds in other.seconds.items():
            self.add(cause, seconds, other.shown_by.get(cause))


def wait_of(records: Iterable[StepRecord], begin: float, end: float) -> Wait:
    """Why a request that was in no step between two moments was in none.

    A step's `bound_by` is the reason until the next one: the scheduler offers shares in the policy's order until a
    budget is used up. "policy": no budget was. "step": it came while one ran. "idle": no step ran.
    """
    wait, at, cause, judged = Wait(), begin, "idle", 0
    last: StepRecord | None = None
    for record in records:
        if record.ended <= begin:
            continue
        if record.started >= end:
            break
        if record.started > at:
            pause = record.started - at
            wait.add(cause if last is not None and pause < BREATH_S else "idle", pause, last)
            at = record.started
        if record.started < begin:
            cause = "step"
        else:
            judged += 1
            cause = "recovery" if record.recovering else record.bound_by or ("policy" if judged > 1 else "first")
        until = min(record.ended, end)
        if until > at:
            wait.add(cause, until - at, record)
            at, last = until, record
    if end > at:
        wait.add(cause if last is not None and end - at < BREATH_S else "idle", end - at, last)
    if first := wait.seconds.pop("first", None):  # planned at the moment when the request came, or held back as later
        wait.add("policy" if "policy" in wait.seconds else "step", first)
    return wait


@dataclass
class Stall:
    """Time beyond the usual between two tokens of a request, all of one cause: "prompts" (of `names`, with their
    tokens), "left out", "idle", or the name of a phase that was slow."""

    seconds: float = 0.0
    times: int = 0
    names: Counter[str] = field(default_factory=Counter)


@dataclass
class Decoding:
    """How a request's tokens came: usually `usual_s` apart, and the stalls by cause."""

    usual_s: float
    stalls: dict[str, Stall]


def decoding_of(request_id: str, times: Sequence[float], records: Sequence[StepRecord]) -> Decoding | None:
    """How tokens that were appended at these moments came, as far as the records say; None for less than two steps."""
    moments = sorted(set(times))
    commits = [record.ended - record.commit_s for record in records]
    gaps = [_Gap(request_id, a, b, _between(records, commits, a, b)) for a, b in pairwise(moments)]
    gaps = [gap for gap in gaps if gap.steps]
    if not gaps:
        return None
    plain = [gap.seconds for gap in gaps if not (gap.gave_way or gap.prompts or gap.idle > NOTICED * gap.seconds)]
    usual = median(plain) if plain else min(gap.seconds for gap in gaps)
    phases = {phase: median(_phase(record, phase) for record in records) for phase in PHASES}
    stalls: dict[str, Stall] = {}
    for gap in gaps:
        excess = gap.seconds - usual
        if gap.gave_way or excess <= max(STALL_S, NOTICED * usual):
            continue
        stall = stalls.setdefault(gap.cause(excess, phases), Stall())
        stall.seconds += excess
        stall.times += 1
        stall.names.update(gap.prompts)
    return Decoding(usual, stalls)


class _Gap:
    """The time between two tokens of a request, and the steps that were committed in it."""

    def __init__(self, request_id: str, begin: float, end: float, steps: Sequence[StepRecord]) -> None:
        self.seconds = end - begin
        self.steps = steps
        self.gave_way = any(request_id in record.preempted_ids for record in steps)
        self.left_out = sum(request_id not in record.request_ids for record in steps)
        busy = sum(max(0.0, min(record.ended, end) - max(record.started, begin)) for record in steps)
        self.idle = max(0.0, self.seconds - busy)
        prefilling = (s for r in steps if r.prefill_tokens for s in r.shares if not s.decoding)
        self.prompts: Counter[str] = Counter()
        for share in prefilling:
            if share.request_id != request_id:
                self.prompts[share.request_id] += share.num_tokens

    def cause(self, excess: float, usual: dict[str, float]) -> str:
        if self.idle > 0.5 * excess:
            return "idle"
        if self.prompts:
            return "prompts"
        if self.left_out:
            return "left out"
        over = {phase: max(_phase(r, phase) for r in self.steps) - usual[phase] for phase in PHASES}
        return max(over, key=lambda phase: over[phase])


def _phase(record: StepRecord, name: str) -> float:
    seconds: float = getattr(record, f"{name}_s")
    return seconds


def _between(records: Sequence[StepRecord], commits: list[float], a: float, b: float) -> Sequence[StepRecord]:
    """The steps committed after one moment, and at the latest at another; both are a commit's own, but for rounding."""
    return records[bisect_right(commits, a + 1e-7) : bisect_right(commits, b + 1e-7)]


def recomputed(shares: Iterable[Share]) -> int:
    """Tokens that a request has computed again, after it had to give its blocks back."""
    reached = again = 0
    for share in shares:
        end = share.start + share.num_tokens
        if not share.decoding:  # that would be a wrong draft's place
            again += max(0, min(reached, end) - share.start)
        reached = max(reached, end)
    return again
