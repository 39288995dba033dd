"""The ring of StepRecords turned round: not what each step did, but what became of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hf_cb.steps import StepRecord

Kind = Literal["queued", "prefill", "decode", "preempted"]


class Span(NamedTuple):
    """A piece of a request's life, on time.perf_counter(); `tokens` computed, in step `step` (-1: in none)."""

    kind: Kind
    begin: float
    end: float
    tokens: int = 0
    step: int = -1


@dataclass
class Life:
    """One request. `ended` and `reason` stay None if it did not end with one of the steps."""

    request_id: str
    created: float
    spans: list[Span] = field(default_factory=list)
    first_token: float | None = None
    ended: float | None = None
    reason: str | None = None


def lives_of(records: Sequence[StepRecord]) -> list[Life]:
    """All requests that were in these steps, in the order in which they came. Where the ring has forgotten how one
    began, its life begins with the first step."""
    lives: list[Life] = []
    alive: dict[str, Life] = {}
    waiting: dict[str, float] = {}  # since when, of those that had to give way
    for record in records:
        for name in record.preempted_ids:
            waiting[name] = record.started
        for name, created in record.admitted:
            if name not in alive or alive[name].created < created:  # another of that name, the first was cancelled
                waiting.pop(name, None)
                lives.append(Life(name, created, [Span("queued", created, record.started)]))
                alive[name] = lives[-1]
        for share in record.shares:
            name = share.request_id
            if name not in alive:
                lives.append(Life(name, record.started))
                alive[name] = lives[-1]
            life = alive[name]
            if (since := waiting.pop(name, None)) is not None:
                life.spans.append(Span("preempted", since, record.started))
            begin = max(record.started, life.spans[-1].end) if life.spans else record.started  # steps may overlap
            kind: Kind = "decode" if share.decoding else "prefill"
            life.spans.append(Span(kind, begin, record.ended, share.num_tokens, record.step))
            if share.new_tokens and life.first_token is None:
                life.first_token = record.ended
        for name, reason in record.finished:
            if name in alive:
                life = alive.pop(name)
                life.ended, life.reason = record.ended, reason
    return sorted(lives, key=lambda life: life.created)
