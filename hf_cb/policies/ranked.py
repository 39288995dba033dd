"""Orders that prefer some requests to others, each with a bound on how long the others may wait."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hf_cb.policies.base import Policy, Situation
from hf_cb.policies.checks import check_count, check_seconds

if TYPE_CHECKING:
    from hf_cb.core import Request

logger = logging.getLogger("hf_cb")


class Priority(Policy):
    """The smallest `priority` first (vLLM's meaning), then the oldest; a request that cannot start takes the place of
    a running one with a larger number.

    Ageing: one step of priority is worth `ageing` seconds. A request goes before all that come more than that later
    for each step between them; so nobody starves, and the order between two requests never changes, so two never take
    turns in preempting each other.

    Args:
        ageing: seconds.
    """

    name = "priority"

    def __init__(self, ageing: float = 30.0) -> None:
        check_seconds(self.name, "ageing", ageing)
        self.ageing = ageing

    def rank(self, request: Request) -> Any:
        return (request.created + self.ageing * request.priority, request.arrival)

    def order(self, situation: Situation) -> Iterable[Request]:
        yield from (r for r in situation.running if r.is_decoding)  # cheap, and they hold their places anyway
        prompts = (r for r in situation.running if not r.is_decoding)
        yield from heapq.merge(prompts, situation.waiting, key=self.rank)

    def gives_way(self, request: Request, running: Sequence[Request]) -> Request | None:
        last = max(running, key=self.rank, default=request)
        # one that has aged past a more important one waits for a place, but takes none from it
        return last if last.priority > request.priority and self.rank(last) > self.rank(request) else None


class Deadline(Policy):
    """The earliest deadline first (EDF). Requests that cannot make it any more go last: under overload they would take
    the time of others that can. `metrics.will_miss` of a request says so.

    Whether one can make it is judged by the fastest of the newest steps and all tokens that it may generate, or a
    single one where nobody set a length.

    Args:
        patience: a request without a deadline is served as if it had one so many seconds after it came.
    """

    name = "deadline"

    def __init__(self, patience: float = 30.0) -> None:
        check_seconds(self.name, "patience", patience)
        self.patience = patience

    def rank(self, request: Request) -> Any:
        due = request.created + self.patience if request.deadline is None else request.deadline
        return (due, request.arrival)

    def order(self, situation: Situation) -> Iterable[Request]:
        step_s, late = situation.fastest_step(), []
        for request in situation.running:
            self._judge(request, situation.now, step_s)
            if request.is_decoding:
                yield request
        prompts = (r for r in situation.running if not r.is_decoding)
        for request in heapq.merge(prompts, situation.waiting, key=self.rank):
            if self._judge(request, situation.now, step_s):
                late.append(request)
            else:
                yield request
        yield from late

    def victim(self, candidates: Sequence[Request]) -> Request:
        return max(candidates, key=lambda r: (r.metrics.will_miss, self.rank(r)))

    def _judge(self, request: Request, now: float, step_s: float) -> bool:
        """Whether it will miss its deadline."""
        if request.deadline is None:
            return False
        steps = request.params.max_new_tokens - request.num_output if request.params.length_is_given else 1
        missed = now + steps * step_s > request.deadline
        if missed and not request.metrics.will_miss:
            logger.info(
                "Request %s cannot make its deadline in %.3f s: it has %d tokens to go, at %.4f s each or more.",
                request.request_id,
                request.deadline - now,
                steps,
                step_s,
            )
        request.metrics.will_miss = missed
        return missed


class LongestPrefix(Policy):
    """Waiting requests with the most tokens in the prefix cache first, before these are evicted (SGLang's cache-aware
    scheduling; Zheng et al. 2024); those that have waited `max_wait` before all, in order of arrival.

    Args:
        max_wait: seconds.
        look_at: how many of the waiting are compared in a step.
    """

    name = "longest_prefix"

    def __init__(self, max_wait: float = 5.0, look_at: int = 128) -> None:
        check_seconds(self.name, "max_wait", max_wait)
        check_count(self.name, "look_at", look_at)
        self.max_wait = max_wait
        self.look_at = look_at

    def order(self, situation: Situation) -> Iterable[Request]:
        yield from situation.decodes_first()
        waiting, old = situation.waiting, 0
        if situation.is_full:
            yield from waiting[:1]  # who cannot start need not be compared
            return
        while old < len(waiting) and situation.now - waiting[old].created > self.max_wait:
            old += 1
        yield from waiting[:old]
        compared = waiting[old : old + self.look_at]
        yield from sorted(compared, key=lambda r: (-situation.cached_tokens(r), r.arrival))
        yield from waiting[old + self.look_at :]
