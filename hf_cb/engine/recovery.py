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

from hf_cb.core import Request, Status, StepPlan

logger = logging.getLogger("hf_cb")


PATIENCE = 64  # steps after which a halved budget is doubled; twice as many after each further shortage


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
    size: int = 0  # requests of the step that raised first
    survived: bool = True  # one of them has come through
    budget: int | None = None  # query tokens of a step
    _patience: int = PATIENCE
    _good_steps: int = 0

    @property
    def hopeless(self) -> bool:
        """Every one of several requests has failed alone: it is not about requests."""
        return not self.groups and not self.survived and self.size > 1

    def current(self) -> Group | None:
        """The group whose turn it is; None if all is well."""
        while self.groups and self.groups[0].reached():
            alive = any(r.status is not Status.FINISHED for r in self.groups.popleft().goals)
            self.survived = self.survived or alive
        return self.groups[0] if self.groups else None

    def succeeded(self) -> None:
        """A step has gone well."""
        if self.budget is not None:
            self._good_steps += 1
            if self._good_steps >= self._patience:
                self._good_steps, self.budget = 0, self.budget * 2

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
            self.size, self.survived = len(goals), False
            logger.warning(
                "A step of %d requests raised %s: %s; it is repeated in parts.", len(goals), type(error).__name__, error
            )
        else:  # some of the group may not have been in this step
            mates = self.groups.popleft().goals
            goals = {r: goals.get(r, goal) for r, goal in mates.items() if r.status is not Status.FINISHED}
        if len(goals) == 1:
            return next(iter(goals))
        requests = list(goals)
        halves = (requests[len(requests) // 2 :], requests[: len(requests) // 2])
        self.groups.extendleft(Group({r: goals[r] for r in half}) for half in halves)
        return None

    def _halve(self, tokens: int) -> None:
        if self.budget is not None and self._good_steps:
            self._patience *= 2
        self.budget, self._good_steps = tokens // 2, 0
        logger.warning("Out of memory with %d tokens in a step: at most %d from now on.", tokens, self.budget)


def is_out_of_memory(error: BaseException) -> bool:
    """Also on a CPU, where PyTorch raises a plain RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
