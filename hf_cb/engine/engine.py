"""The engine: admit requests, then step until all have ended.

A step is plan, build, forward, sample, commit. `launch` does all but the last, so that a caller may launch the next
step before it commits the present one; `step` is the plain loop.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from heapq import heapify, heappop, heappush

import torch

from hf_cb.core import FinishReason, Request, Status, Update
from hf_cb.engine import batch as batching
from hf_cb.engine import records
from hf_cb.engine.commits import Commits
from hf_cb.engine.device_sampler import sampler_for
from hf_cb.engine.flight import InFlight
from hf_cb.engine.kv_cache import KVCache
from hf_cb.engine.limits import fit
from hf_cb.engine.logprobs import Prompts, split
from hf_cb.engine.recovery import Recovery
from hf_cb.engine.runner import Runner
from hf_cb.engine.sampler import Sampled, SamplingStep
from hf_cb.engine.scheduler import Scheduler
from hf_cb.engine.speculation import DraftSource
from hf_cb.engine.stopping import end_times, is_late
from hf_cb.errors import ModelChangedError
from hf_cb.kernels.device import on
from hf_cb.policies import Policy
from hf_cb.sizes import ResolvedConfig
from hf_cb.steps import StepPlan, StepRecord


class Engine:
    """Requests in, tokens out. One thread at a time drives it; `clock` gives it the time, in seconds."""

    def __init__(
        self,
        runner: Runner,
        config: ResolvedConfig,
        policy: Policy | None = None,
        sampler: SamplingStep | None = None,
        drafts: DraftSource | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.clock = clock
        self.config = config
        sharing = runner.shares_prefixes
        self.kv = KVCache(
            runner.groups, config.num_blocks, config.block_size, config.prefix_caching and sharing, forks=sharing
        )
        self.scheduler = Scheduler(config, self.kv, policy, drafts if sharing else None, clock)
        self.sampler = sampler or sampler_for(runner.device)
        self.commits = Commits(self.scheduler, self.kv, runner, clock)
        self.overlap = config.overlap and runner.overlaps and drafts is None
        self._flight: InFlight | None = None  # where steps overlap: launched, and not yet committed
        self.records: deque[StepRecord] = deque(maxlen=config.trace_steps)
        self.recovery = Recovery()
        self.recovers = True  # False: what a step raises is raised
        self.num_steps = 0
        self._weights_key: object = None
        self._ends: list[tuple[float, int, Request]] = []  # a heap of the times that may end a request

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._flight)

    def idle_s(self) -> float:
        """Seconds for which there is nothing to do unless something changes: 0 if a step can run now."""
        if not self.has_work:
            return math.inf
        until = self.scheduler.held_until
        if until is None or self._flight is not None:
            return 0.0
        return max(0.0, min([until, *(end for end, _, _ in self._ends[:1])]) - self.clock())

    def admit(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            PromptError: it can never fit, with the numbers.
        """
        request.params = replace(request.params, max_new_tokens=fit(request, self.config, self.kv))
        request.regime = self.runner.key_regime(request)
        if len(self._ends) > 64 + 8 * (len(self.scheduler.waiting) + len(self.scheduler.running)):
            self._ends = [entry for entry in self._ends if entry[2].status is not Status.FINISHED]
            heapify(self._ends)
        for end in end_times(request):
            heappush(self._ends, (end, request.arrival, request))
        self.scheduler.add(request)

    @torch.no_grad()
    def step(self) -> list[Update]:
        """One step: what it changed, request by request. Where steps overlap, what the step before it changed."""
        with on(self.runner.device):
            return self._step()

    def _step(self) -> list[Update]:
        updates = self.expire()
        before, self._flight = self._flight, None
        if before is not None and not self._may_run_ahead(before):
            updates += self.commit(before)
            before = None
        flight = self._start(before)
        if before is not None:
            updates += self.commit(before)  # while the device computes
        if flight is not None:
            self._sample(flight)
            if self.overlap and any(part.request.in_flight for part in flight.plan.parts):
                self._flight = flight
            else:
                updates += self.commit(flight)
        return updates

    @property
    def is_settled(self) -> bool:
        """Whether no step is launched whose commit is still to come."""
        return self._flight is None

    def settle(self) -> list[Update]:
        """Commits what is launched, so that nothing is in flight: what that changed."""
        before, self._flight = self._flight, None
        return self.commit(before) if before is not None else []

    @torch.no_grad()
    def launch(self) -> InFlight | None:
        """Plans a step and runs it; None if nothing can run before an earlier one is committed, or `idle_s` is over."""
        flight = self._start(None)
        if flight is not None:
            self._sample(flight)
        return flight

    def _start(self, before: InFlight | None) -> InFlight | None:
        """Plan, build, forward. The step `before` is not committed yet: its tokens are taken as they come."""
        times = [self.clock()]
        if self.scheduler.waiting:  # only who comes in can find what was computed with other weights
            self.runner.new_requests()
            self._check_weights()
        plan = self._plan(run_ahead=before is not None)
        if not plan.parts:
            held = self.scheduler.held_until is not None
            if self.has_work and not held and not any(r.in_flight for r in self.scheduler.running):
                policy = self.scheduler.policy.name
                raise RuntimeError(f"Nothing was found to run though requests wait: a bug in hf_cb, or in {policy!r}.")
            return None
        for request in plan.preempted:
            self.runner.forget(request)
        for request in plan.admitted:
            request.started = times[0] if request.started is None else request.started
        times.append(self.clock())
        flight = InFlight(plan, times)
        try:
            tokens = before.unread() if before is not None else None
            batch = batching.build(plan, len(self.kv.groups), self.config.block_size, tokens)
            batch.draws = self.sampler.draws(plan.parts)
            times.append(self.clock())
            flight.logits = self.runner.forward(batch)
            times.append(self.clock())
        except Exception as error:
            flight.error = error
        return flight

    def _sample(self, flight: InFlight) -> None:
        logits, flight.logits = flight.logits, None
        try:
            if flight.error is not None:
                raise flight.error
            assert logits is not None
            logits, flight.prompts = split(logits, flight.plan.parts)
            flight.sampled = self.sampler.sample(logits, flight.plan.parts)
            self.recovery.succeeded(self.config.max_batch_tokens)
        except Exception as error:
            if not self.recovers:
                raise
            flight.error, flight.prompts = None, Prompts()
            flight.plan, flight.sampled = self._recover(flight.plan, error)
        flight.times += [self.clock()] * (5 - len(flight.times))

    def _may_run_ahead(self, before: InFlight) -> bool:
        return not (before.plan.short or self.recovery.groups or self.recovery.budget)

    @torch.no_grad()
    def commit(self, flight: InFlight) -> list[Update]:
        """Appends the sampled tokens, ends what is to end, gives blocks back, leaves a StepRecord."""
        sampled, prompts = flight.read(), flight.prompts.read()
        began = self.clock()
        state = records.state_of(self.scheduler, self.recovery)
        pairs = zip(flight.plan.parts, sampled, strict=True)
        found = [self.commits.part(part, s, began, prompts.get(part.request, ())) for part, s in pairs]
        state |= {"step": self.num_steps, "commit_s": self.clock() - began, "sampled": sum(map(len, sampled))}
        self.records.append(records.record_of(flight.plan, flight.times, began, found, **state))
        self.num_steps += 1
        self.scheduler.pacing.observe(self.records[-1], self.clock())
        return [update for update in found if update is not None]

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> Update | None:
        """Ends a request at once, or when the step that it is in is committed; None if there is nothing to tell yet."""
        if request.status is Status.FINISHED:
            return None
        if request.in_flight:
            request.cancelled = True
            return None
        self.commits.finish(request, reason)
        return Update(request, [])

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request with its error."""
        self.commits.fail(request, error)

    def drop_all(self) -> None:
        """Takes every request out, in the middle of whatever it was."""
        self._flight = None
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.commits.take_out(request)

    def expire(self) -> list[Update]:
        """Ends the requests whose time is up."""
        now, late, busy = self.clock(), [], []
        while self._ends and self._ends[0][0] < now:
            entry = heappop(self._ends)
            request = entry[2]
            if request.in_flight:
                busy.append(entry)
            elif request.status is not Status.FINISHED and is_late(request, now):
                self.commits.finish(request, "timeout")
                late.append(Update(request, []))
        for entry in busy:
            heappush(self._ends, entry)
        return late

    def weights_written(self) -> None:
        """Somebody has changed the weights in a way that leaves no trace."""
        self.kv.drop_cache()
        self.runner.lend()

    def check_idle(self) -> None:
        """With no request alive, every block is free or cached and every queue is empty; AssertionError otherwise."""
        assert not self.has_work, "requests are alive"
        assert self.kv.pool.num_held == 0, f"{self.kv.pool.num_held} blocks are held by nobody"
        self.kv.pool.check_integrity()
        self.scheduler.host.check_idle()

    def _plan(self, run_ahead: bool) -> StepPlan:
        group, budget = self.recovery.current(), self.recovery.budget
        if group is None:
            return self.scheduler.plan(budget=budget, run_ahead=run_ahead)
        plan = StepPlan() if group.relieved else self.scheduler.plan(group.goals, budget)
        if plan.parts or any(r.in_flight for r in group.goals):
            return plan
        for request in plan.preempted:
            self.runner.forget(request)
        others = [r for r in self.scheduler.running if r not in group.goals and not r.in_flight]
        for request in others:
            self._give_way(request)  # they hold the blocks or the memory that it needs
        relieved = self.scheduler.plan(group.goals, budget)
        relieved.preempted += others
        return relieved

    def _recover(self, plan: StepPlan, error: Exception) -> tuple[StepPlan, list[list[Sampled]]]:
        """What is left of a step that raised: nothing, or the request that is to blame, with its error.

        Raises:
            The error itself, if it is not about requests.
        """
        traceback.clear_frames(error.__traceback__)  # they hold activations
        plan.parts = [part for part in plan.parts if part.request.status is not Status.FINISHED]
        for request in plan.preempted:
            self.scheduler.host.drop(request)  # it may not have been copied
        tried = [part.request for part in plan.parts]
        for request in tried:
            self._give_way(request)
        culprit = None if isinstance(error, ModelChangedError) else self.recovery.after(plan, error)
        if isinstance(error, ModelChangedError) or (culprit is not None and self.recovery.hopeless):
            raise error
        parts = [part for part in plan.parts if part.request is culprit]
        left = StepPlan(parts, [*plan.preempted, *tried], admitted=plan.admitted)
        return left, [[Sampled(-1, exception=error)] for _ in parts]

    def _give_way(self, request: Request) -> None:
        request.fork_of = None  # which may run in another group
        self.scheduler.preempt(request)
        self.runner.forget(request)

    def _check_weights(self) -> None:
        if self.kv.prefix_caching:
            key = self.runner.weights_key()
            if key != self._weights_key:
                self.kv.drop_cache()
                self._weights_key = key
