"""After a step that raised: whose fault was it?

All requests of the step give way (what they had computed may be half done) and run again in two groups, one after the
other, with nobody else beside them; a group that fails is halved again. So a request that makes the forward raise ends
up alone, and ends with its error, while the others go on.

Running out of memory is nobody's fault at first: the token budget of a step is halved, and grows again after a while.
At a single token all others give way, and only if that is not enough the request ends.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

import torch

from hf_cb.core import Request, Status
from hf_cb.errors import describe
from hf_cb.steps import StepPlan

logger = logging.getLogger("hf_cb")


PATIENCE = 64  # steps after which a halved budget is doubled; twice as many if that was too early
HOPELESS = 16  # requests that fail alone, one after the other, with no good step between them


@dataclass
class Group:
    """Requests that run alone until each has computed `goals[request]` tokens."""

    goals: dict[Request, int]
    relieved: bool = False  # all others are to give way first

    def reached(self) -> bool:
        return all(r.status is Status.FINISHED or r.num_computed >= goal for r, goal in self.goals.items())


@dataclass
class Recovery:
    """The groups that are still to run, what became of those that have, and what memory allows."""

    groups: deque[Group] = field(default_factory=deque)
    culprits: int = 0  # since the last good step
    budget: int | None = None  # query tokens of a step
    _patience: int = PATIENCE
    _good_steps: int = 0
    _raised: bool = False  # the budget, since the last shortage

    @property
    def hopeless(self) -> bool:
        """It is not about requests."""
        return self.culprits >= HOPELESS

    def current(self) -> Group | None:
        """The group whose turn it is; None if all is well."""
        while self.groups and self.groups[0].reached():
            self.groups.popleft()
        return self.groups[0] if self.groups else None

    def succeeded(self, max_tokens: int) -> None:
        """A step has gone well; usually it may have `max_tokens`."""
        self.culprits = 0
        if self.budget is not None:
            self._good_steps += 1
            if self._good_steps < self._patience:
                return
            if self.budget < max_tokens:
                self._good_steps, self.budget, self._raised = 0, min(self.budget * 2, max_tokens), True
            else:  # it is over
                self.budget, self._patience, self._raised = None, PATIENCE, False

    def after(self, plan: StepPlan, error: Exception) -> Request | None:
        """Takes note of a step that raised. Returns a request that is to end with the error, if one is found."""
        goals = {p.request: p.start + p.num_tokens for p in plan.parts}
        relieved = bool(self.groups) and self.groups[0].relieved
        if is_out_of_memory(error):
            if plan.num_tokens > 1:
                self._halve(plan.num_tokens)
                return None
            if not relieved:
                self.groups.appendleft(Group(goals, relieved=True))
                return None
        if not self.groups:
            logger.warning("A step of %d requests raised %s; it is repeated in parts.", len(goals), describe(error))
        else:  # some of the group may not have been in this step
            mates = self.groups.popleft().goals
            goals = {r: goals.get(r, goal) for r, goal in mates.items() if r.status is not Status.FINISHED}
        if len(goals) == 1:
            self.culprits += 1
            return next(iter(goals))
        requests = list(goals)
        halves = (requests[len(requests) // 2 :], requests[: len(requests) // 2])
        self.groups.extendleft(Group({r: goals[r] for r in half}) for half in halves)
        return None

    def _halve(self, tokens: int) -> None:
        if self._raised:  # that was too early
            self._patience *= 2
        self.budget, self._good_steps, self._raised = tokens // 2, 0, False
        logger.warning("Out of memory with %d tokens in a step: at most %d from now on.", tokens, self.budget)


def is_out_of_memory(error: BaseException) -> bool:
    """Also on a CPU, where PyTorch raises a plain RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    signs = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
