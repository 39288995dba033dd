"""What a policy is, and the two that need nothing but the requests: first come, first served, and prompts first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_cb.core import Request
    from hf_cb.steps import StepPlan


@dataclass(frozen=True)
class Situation:
    """What a policy is asked about. `running` and `waiting` are sorted by the policy's `rank`; times are in seconds on
    the engine's clock, as `Request.created` and `Request.deadline` are."""

    running: Sequence[Request]
    waiting: Sequence[Request]
    now: float
    max_num_seqs: int
    closing: bool  # no more requests will come, as far as is known
    cached_tokens: Callable[[Request], int]  # about how many of its tokens a waiting request would find in the cache
    fastest_step: Callable[[], float]  # seconds of the fastest of the newest steps; 0 before the first

    @property
    def is_full(self) -> bool:
        return len(self.running) >= self.max_num_seqs

    def decodes_first(self) -> list[Request]:
        """The running requests: those that generate, then those whose prompt is still being computed."""
        decoding = [r for r in self.running if r.is_decoding]
        if len(decoding) < len(self.running):  # in most steps they all do
            decoding += [r for r in self.running if not r.is_decoding]
        return decoding


class Policy:
    """First come, first served; to be subclassed. A method that is not overridden does what is usual.

    It is asked by the scheduler, once a step, in the engine's thread, and holds up that step. One object may serve
    several managers, so what it remembers should be about requests.
    """

    name = "policy"

    def rank(self, request: Request) -> Any:
        """A request's place: smaller is earlier. It must not change while the request lives."""
        return request.arrival

    def order(self, situation: Situation) -> Iterable[Request]:
        """Who is offered a share of this step, first to last. Who is left out has to wait. Where a waiting request
        cannot start for lack of room, none that comes after it may; so the rest need not be sorted: be lazy."""
        yield from situation.decodes_first()
        yield from situation.waiting

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Who of the running gives its blocks back when they run out; it is computed again later."""
        return max(candidates, key=self.rank)

    def gives_way(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Who of the running gives its place to `request`, which waits and cannot start otherwise; None: nobody. It
        must be somebody that could not take the place back at once."""
        return None

    def wake_time(self, situation: Situation) -> float | None:
        """When to be asked again if `order` offered nobody and nothing else happens until then; None: it never holds
        everybody back."""
        return None

    @property
    def may_hold_back(self) -> bool:
        """Whether it ever offers nobody a share though requests wait."""
        return type(self).wake_time is not Policy.wake_time

    def planned(self, plan: StepPlan) -> None:
        """A step has been planned: who got how much."""


class Continuous(Policy):
    """Decodes first, then running prompts, then new ones in order of arrival; the newest gives way (Orca's
    iteration-level scheduling; Yu et al. 2022)."""

    name = "continuous"


class PrefillFirst(Policy):
    """Prompts first, so that first tokens come soon; running answers pay for it."""

    name = "prefill_first"

    def order(self, situation: Situation) -> Iterable[Request]:
        yield from (r for r in situation.running if not r.is_decoding)
        yield from situation.waiting
        yield from (r for r in situation.running if r.is_decoding)
