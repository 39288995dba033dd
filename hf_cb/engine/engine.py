"""The engine: admit requests, then step until all have ended.

A step is plan, build, forward, sample, commit. `launch` does all but the last, so that a caller may launch the next
step before it commits the present one; `step` is the plain loop.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hf_cb.core import FinishReason, PlanPart, Request, Status, StepBatch, StepPlan, StepRecord, Update
from hf_cb.engine import batch as batching
from hf_cb.engine.kv_cache import KVCache
from hf_cb.engine.limits import fit
from hf_cb.engine.policies import Policy
from hf_cb.engine.sampler import Sampled, Sampler, SamplingStep
from hf_cb.engine.scheduler import Scheduler
from hf_cb.engine.speculation import DraftSource
from hf_cb.engine.stopping import check_stop, is_late
from hf_cb.models.groups import LayerGroup
from hf_cb.sizes import ResolvedConfig


class Runner(Protocol):
    """The forward of a step, as the engine sees it (`models.paged.PagedModel` is one)."""

    groups: list[LayerGroup]

    @property
    def shares_prefixes(self) -> bool:
        """Whether a request can start behind tokens that another has computed: everything is in the blocks then."""
        ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: StepBatch) -> Tensor: ...

    def weights_key(self) -> object:
        """Changes when cached keys and values are no longer those of the weights."""
        ...

    def key_regime(self, request: Request) -> Hashable:
        """Requests of different regimes share no keys; when a request's moves, its keys are computed again."""
        ...

    def forget(self, request: Request) -> None:
        """It has ended or was preempted: state that is kept for it is of no use any more."""
        ...


@dataclass
class InFlight:
    """A step that is launched and not yet committed."""

    plan: StepPlan
    sampled: list[list[Sampled]]
    times: list[float]  # before plan, before build, before forward, before sample, after sample


class Engine:
    """Requests in, tokens out. One thread at a time drives it."""

    def __init__(
        self,
        runner: Runner,
        config: ResolvedConfig,
        policy: Policy | None = None,
        sampler: SamplingStep | None = None,
        drafts: DraftSource | None = None,
    ) -> None:
        self.runner = runner
        self.config = config
        sharing = runner.shares_prefixes
        self.kv = KVCache(
            runner.groups, config.num_blocks, config.block_size, config.prefix_caching and sharing, forks=sharing
        )
        self.scheduler = Scheduler(config, self.kv, policy, drafts if sharing else None)
        self.sampler = sampler or Sampler()
        self.records: deque[StepRecord] = deque(maxlen=config.trace_steps)
        self.num_steps = 0
        self._weights_key: object = None
        self._timed: set[Request] = set()  # those that time can end

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def admit(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            PromptError: it can never fit, with the numbers.
        """
        request.params = replace(request.params, max_new_tokens=fit(request, self.config, self.kv))
        request.regime = self.runner.key_regime(request)
        if request.deadline is not None or request.params.max_time is not None:
            self._timed.add(request)
        self.scheduler.add(request)

    def step(self) -> list[Update]:
        """One step of the plain loop: what it changed, request by request."""
        late = self.expire()
        flight = self.launch()
        return late + (self.commit(flight) if flight is not None else [])

    @torch.no_grad()
    def launch(self) -> InFlight | None:
        """Plans a step and runs it; None if nothing can run before an earlier step is committed."""
        times = [time.perf_counter()]
        if self.scheduler.waiting:  # only who comes in can find what was computed with other weights
            self._check_weights()
        plan = self.scheduler.plan()
        if not plan.parts:
            if self.has_work and not any(r.in_flight for r in self.scheduler.running):
                raise RuntimeError("The scheduler found nothing to run though requests wait: this is a bug in hf_cb.")
            return None
        for request in plan.preempted:
            self.runner.forget(request)
        for request in plan.admitted:
            request.started = request.started or times[0]
        times.append(time.perf_counter())
        step_batch = batching.build(plan, len(self.kv.groups), self.config.block_size, self.runner.device)
        times.append(time.perf_counter())
        logits = self.runner.forward(step_batch)
        times.append(time.perf_counter())
        sampled = self.sampler.sample(logits, plan.parts)
        times.append(time.perf_counter())
        return InFlight(plan, sampled, times)

    @torch.no_grad()
    def commit(self, flight: InFlight) -> list[Update]:
        """Appends the sampled tokens, ends what is to end, gives blocks back, leaves a StepRecord."""
        began = time.perf_counter()
        held, cached = self.kv.pool.num_held, self.kv.pool.num_cached
        updates = [
            self._commit_part(part, sampled, began)
            for part, sampled in zip(flight.plan.parts, flight.sampled, strict=True)
        ]
        self._record(flight, held, cached, began)
        return updates

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> Update | None:
        """Ends a request at once, or when the step that it is in is committed; None if there is nothing to tell yet."""
        if request.status is Status.FINISHED:
            return None
        if request.in_flight:
            request.cancelled = True
            return None
        self._finish(request, reason)
        return Update(request, [])

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request with its error."""
        traceback.clear_frames(error.__traceback__)  # they hold a step's logits
        request.in_flight = 0
        request.exception = error
        self._finish(request, "error")

    def drop_all(self) -> None:
        """Takes every request out, in the middle of whatever it was."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            request.in_flight = 0
            self._take_out(request)

    def expire(self) -> list[Update]:
        """Ends the requests whose time is up."""
        now = time.perf_counter()
        late = [r for r in self._timed if not r.in_flight and is_late(r, now)]
        for request in late:
            self._finish(request, "timeout")
        return [Update(request, []) for request in late]

    def check_idle(self) -> None:
        """With no request alive, every block is free or cached and every queue is empty; AssertionError otherwise."""
        assert not self.has_work, "requests are alive"
        assert self.kv.pool.num_held == 0, f"{self.kv.pool.num_held} blocks are held by nobody"
        self.kv.pool.check_integrity()

    def _commit_part(self, part: PlanPart, sampled: list[Sampled], now: float) -> Update:
        request, since = part.request, part.start
        request.in_flight = 0
        if request.cancelled:
            self._finish(request, "cancelled")
            return Update(request, [])
        request.num_computed = part.start + part.num_tokens - len(part.drafts)
        new_ids: list[int] = []
        reason: FinishReason | None = None
        for i, found in enumerate(sampled):
            failure = found.exception
            if failure is None:
                new_ids.append(found.token_id)
                try:
                    reason = self._append(request, found, now)
                except Exception as error:  # a request's own stop check: it ends that request and nobody else's
                    failure = error
                except SystemExit as error:
                    failure = RuntimeError(f"A stop check of this request called sys.exit({error}).")
            if failure is not None:
                self.fail(request, failure)
                return Update(request, new_ids)
            if reason is not None or i == len(part.drafts) or part.drafts[i] != found.token_id:
                break
            request.num_computed += 1  # the draft was right, so its keys and values are too
        self.kv.publish(request, since)
        if reason is not None:
            self._finish(request, reason)
        elif (regime := self.runner.key_regime(request)) != request.regime:
            self.kv.restart(request, regime)
        return Update(request, new_ids)

    def _append(self, request: Request, found: Sampled, now: float) -> FinishReason | None:
        request.token_ids.append(found.token_id)
        request.timestamps.append(now)
        request.first_token = request.first_token or now
        if found.logprob is not None:
            request.logprobs.append(found.logprob)
        return check_stop(request, now)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._take_out(request)
        request.finish_reason = reason
        request.finished = time.perf_counter()
        m = request.metrics
        m.e2e_s = request.finished - request.created
        m.queue_s = (request.started or request.finished) - request.created
        if request.first_token is not None and request.started is not None:
            m.ttft_s = request.first_token - request.created
            m.prefill_s = request.first_token - request.started
        if request.num_output > 1:
            m.itl_s = (request.timestamps[-1] - request.timestamps[0]) / (request.num_output - 1)

    def _take_out(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.runner.forget(request)
        self._timed.discard(request)
        # processors may hold much, and a handle may keep the request for long
        request.params = replace(request.params, process=None, stop_checks=())

    def _check_weights(self) -> None:
        if self.kv.prefix_caching:
            key = self.runner.weights_key()
            if key != self._weights_key:
                self.kv.drop_cache()
                self._weights_key = key

    def _record(self, flight: InFlight, held: int, cached: int, began: float) -> None:
        plan, t = flight.plan, flight.times
        self.records.append(
            StepRecord(
                step=self.num_steps,
                started=t[0],
                plan_s=t[1] - t[0],
                build_s=t[2] - t[1],
                forward_s=t[3] - t[2],
                sample_s=t[4] - t[3],
                commit_s=time.perf_counter() - began,
                decode_tokens=sum(p.num_tokens for p in plan.parts if p.was_decoding),
                prefill_tokens=sum(p.num_tokens for p in plan.parts if not p.was_decoding),
                tokens_allowed=self.config.max_batch_tokens,
                blocks_used=held,
                blocks_cached=cached,
                blocks_allowed=self.kv.pool.num_blocks,
                requests=len(plan.parts),
                requests_allowed=self.config.max_num_seqs,
                waiting=len(self.scheduler.waiting),
                preempted=len(plan.preempted),
                sampled=sum(len(s) for s in flight.sampled),
                bound_by=plan.bound_by,
            )
        )
        self.num_steps += 1
