"""Equal service for users, whatever each of them sends: virtual token counters (Sheng et al. 2024, "Fairness in Serving
Large Language Models")."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hf_cb.errors import OptionError
from hf_cb.policies.base import Policy, Situation
from hf_cb.policies.checks import check_weight

if TYPE_CHECKING:
    from hf_cb.core import Request
    from hf_cb.steps import StepPlan

KEPT_USERS = 1024  # counters of users who have nothing waiting, before those that say nothing are forgotten


class Fair(Policy):
    """The next place goes to the user who has been served least; each user's requests in order of arrival. Those
    without a user count as one.

    A user's counter grows with the tokens that are computed for them, divided by their weight. One who comes back
    starts at the counter of the least served who waits, so that nobody saves up while away. Only a user's own service
    moves their counter up, so everybody's turn comes.

    Args:
        weights: users' shares; 1 for all that are not named.
        output_weight: what a generated token counts, in tokens of a prompt.
    """

    name = "fair"

    def __init__(self, weights: Mapping[str, float] | None = None, output_weight: float = 2.0) -> None:
        check_weight(self.name, "output_weight", output_weight)
        if weights is not None and not isinstance(weights, Mapping):
            raise OptionError(f"weights of the policy 'fair' must be a dict from users to numbers, not {weights!r}.")
        for user, weight in (weights or {}).items():
            check_weight(self.name, f"the weight of {user!r}", weight)
        self.weights = dict(weights or {})
        self.output_weight = output_weight
        self.served: dict[str | None, float] = {}
        self._queued: dict[str | None, Request] = {}  # by user, the newest that waited when it was last looked at
        self._last = 0.0  # the counter of those who were the last in the queue

    def order(self, situation: Situation) -> Iterable[Request]:
        yield from sorted(situation.running, key=lambda r: (not r.is_decoding, self._counter(r), r.arrival))
        if situation.is_full:
            yield from situation.waiting[:1]  # who cannot start need not be sorted
            return
        self._note_queued({r.user: r for r in situation.waiting})
        yield from self._by_turns(situation.waiting)

    def planned(self, plan: StepPlan) -> None:
        for part in plan.parts:
            cost, request = self.output_weight * part.samples, part.request
            if not part.was_decoding and not request.num_output:  # what is computed again later is not their doing
                cost += part.num_tokens
            self.served[request.user] = self._counter(request) + cost / self.weights.get(request.user or "", 1.0)

    def _counter(self, request: Request) -> float:
        return self.served.get(request.user, 0.0)

    def _by_turns(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Always of the user who would have been served least if those before had their prompts computed."""
        queues: dict[str | None, deque[Request]] = {}
        for request in waiting:
            queues.setdefault(request.user, deque()).append(request)
        heap = [(self._counter(queue[0]), queue[0].arrival, user) for user, queue in queues.items()]
        heapq.heapify(heap)
        while heap:
            counter, _, user = heapq.heappop(heap)
            request = queues[user].popleft()
            yield request
            if queues[user]:
                counter += len(request.prompt_ids) / self.weights.get(user or "", 1.0)
                heapq.heappush(heap, (counter, queues[user][0].arrival, user))

    def _note_queued(self, queued: dict[str | None, Request]) -> None:
        # by requests, since another manager may look at its own queue in between
        stayed = {user: request for user, request in self._queued.items() if request.status.value == "waiting"}
        if not stayed and self._queued:
            self._last = max(self.served.get(user, 0.0) for user in self._queued)
        least = min((self.served.get(user, 0.0) for user in stayed), default=self._last)
        for user in queued.keys() - stayed.keys():
            self.served[user] = max(self.served.get(user, 0.0), least)
        self._queued = stayed | queued
        if len(self.served) > 2 * len(self._queued) + KEPT_USERS:
            counts = self.served.copy()  # in one go: another manager's thread may count
            self.served = {user: count for user, count in counts.items() if count > least or user in self._queued}
