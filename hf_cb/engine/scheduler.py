"""Who runs this step, under three budgets: query tokens, KV blocks, requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from hf_cb.core import Request, Status
from hf_cb.engine.host_blocks import HostBlocks
from hf_cb.engine.kv_cache import KVCache
from hf_cb.engine.logprobs import SCORED_ROWS, prompt_rows
from hf_cb.engine.pacing import Pacing
from hf_cb.engine.shares import Shares
from hf_cb.engine.speculation import DraftSource
from hf_cb.policies import Continuous, Policy, Situation
from hf_cb.policies.asking import insert, misnamed, order_of, wake_time_of
from hf_cb.sizes import ResolvedConfig
from hf_cb.steps import PlanPart, StepPlan


class Scheduler:
    """Keeps the waiting and the running requests, both by the policy's rank, and plans one step at a time."""

    def __init__(
        self,
        config: ResolvedConfig,
        kv: KVCache,
        policy: Policy | None = None,
        drafts: DraftSource | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.kv = kv
        self.policy = policy or Continuous()
        self.drafts = drafts
        self.clock = clock
        self.pacing = Pacing(config.itl_target)
        self.host = HostBlocks(config.host_blocks)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self.closing = False  # no more requests will come
        self.expects = True  # False: none will until whoever submits says so
        self.held_until: float | None = None  # the policy holds everybody back until then, or until something changes

    def add(self, request: Request) -> None:
        insert(self.policy, self.waiting, request)
        self.held_until = None

    def remove(self, request: Request) -> None:
        """A request has ended: its blocks go back."""
        self.kv.free(request)
        self.host.drop(request)
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        request.status = Status.FINISHED
        self.held_until = None

    def close(self, closing: bool = True) -> None:
        """No more requests will come (or some will after all)."""
        if self.closing != closing:
            self.closing, self.held_until = closing, None

    def expect(self, more: bool) -> None:
        """Whether those who submit may have more requests."""
        self.expects, self.held_until = more, None

    def plan(
        self, only: Collection[Request] | None = None, budget: int | None = None, run_ahead: bool = False
    ) -> StepPlan:
        """The next step, of these requests only, with at most `budget` tokens. Requests of a step that is not committed
        yet are left out, unless they may `run_ahead`: on a token that is sampled and not yet read."""
        plan = StepPlan()
        self.host.begin_step()
        policy, situation = self.policy, self._situation(only)
        if only is not None:
            policy = Continuous()  # these are to run now, whatever is usual
        allowed = budget or self.config.max_batch_tokens
        shares = Shares(allowed, self._prompt_tokens(allowed), SCORED_ROWS)
        closed = False  # no new request may start
        running, unasked = set(situation.running), set(situation.running)
        for request in order_of(policy, situation):
            if closed and not unasked:
                break  # only new requests are left, perhaps thousands, and none may start
            if not isinstance(request, Request):
                raise misnamed(policy, "order", request)
            is_running = request in running
            unasked.discard(request)
            if request.in_flight and not (run_ahead and _goes_on(request)):
                continue
            if request in shares.parts or request in plan.preempted:
                continue
            if shares.tokens == 0:
                plan.bound_by = plan.bound_by or "tokens"
                break
            room = shares.room(request)
            if room == 0 and shares.rows == 0 and request.scores_prompt:
                continue  # its turn comes in the next step
            if room == 0:  # prompts have had theirs
                plan.bound_by = plan.bound_by or "tokens"
                closed = True
                continue
            if not is_running and request.status is Status.WAITING:
                # a new request takes blocks from a running one only as the policy says, and none behind it overtakes
                if closed or self._waits_for_source(request):
                    continue
                if request not in self.waiting:
                    raise misnamed(policy, "order", request)
                part = self._admit(request, room, plan)
                while part is None and self._make_way(policy, request, plan, shares, run_ahead):
                    part = self._admit(request, shares.room(request), plan)
                closed = part is None
            else:
                if not is_running:
                    raise misnamed(policy, "order", request)
                part = self._part(request, room)
                if part is None:
                    gave_way = len(plan.preempted)
                    part = self._make_room(request, plan, shares, run_ahead)
                    # what somebody gives back is for those who run: prompts that take it in turns get nowhere
                    closed |= len(plan.preempted) > gave_way
            if part is not None:
                shares.add(part)
                if not part.samples and shares.room(request) == 0:
                    plan.bound_by = plan.bound_by or "tokens"
        plan.parts = list(shares.parts.values())
        for part in plan.parts:
            request = part.request
            request.in_flight += part.num_tokens
            request.num_computed += part.num_tokens
            request.ahead += part.samples > 0
        if not plan.parts and not self.running:
            wake = wake_time_of(policy, situation)
            self.held_until = wake if wake is not None and wake > situation.now else None
        self.policy.planned(plan)
        return plan

    def _situation(self, only: Collection[Request] | None) -> Situation:
        return Situation(
            running=list(self.running) if only is None else [r for r in self.running if r in only],
            waiting=list(self.waiting) if only is None else [r for r in self.waiting if r in only],
            now=self.clock(),
            max_num_seqs=self.config.max_num_seqs,
            closing=self.closing or not self.expects,
            cached_tokens=self.kv.cached_tokens,
            fastest_step=self.pacing.fastest_step,
        )

    def _prompt_tokens(self, allowed: int) -> int:
        """What all prompts of the step may have together: no more than running answers can wait for."""
        most = min(self.config.prefill_chunk, allowed)
        if most == allowed and self.pacing.target is None:
            return allowed
        if self.pacing.target is None:
            return most if any(r.is_decoding for r in self.running) else allowed
        rows = sum(r.is_decoding for r in self.running)
        return min(most, self.pacing.prompt_tokens(rows)) if rows else allowed

    def _waits_for_source(self, request: Request) -> bool:
        """Whether a fork's prompt is about to be computed by the request that it is a fork of."""
        source = request.fork_of
        return (
            source is not None
            and (self.kv.forks or source.scores_prompt)
            and source.status is not Status.FINISHED
            and source.pending > 0
            and not source.num_output
        )

    def _admit(self, request: Request, room: int, plan: StepPlan) -> PlanPart | None:
        """A waiting request starts, if there is room for it."""
        if len(self.running) >= self.config.max_num_seqs:
            plan.bound_by = "requests"
            return None
        loads, source = self._load(request), request.fork_of
        if not loads and source is not None and source.status is Status.RUNNING and not request.num_output:
            request.num_computed = self.kv.fork(request, source, len(request.prompt_ids) - 1)
        request.num_computed = request.num_computed or self.kv.hit(request)
        part = self._part(request, room)
        if part is None:
            self.kv.free(request)
            request.num_computed = 0
            plan.bound_by = "blocks"
            return None
        part.loads = loads
        self.host.drop(request)
        if request.metrics.preemptions == 0:
            request.metrics.cached_tokens = request.num_computed
        self.waiting.remove(request)
        insert(self.policy, self.running, request)
        request.status = Status.RUNNING
        plan.admitted.append(request)
        return part

    def _make_way(self, policy: Policy, request: Request, plan: StepPlan, shares: Shares, run_ahead: bool) -> bool:
        """Whether a running request has given its place to one that waits, as the policy has it."""
        victim = policy.gives_way(request, self.running)
        if victim is None:
            return False
        if victim not in self.running:
            raise misnamed(policy, "gives_way", victim)
        if victim.in_flight:
            plan.short = plan.short or run_ahead  # it can when all steps are committed
            return False
        self._take_back(victim, plan, shares)
        return True

    def _make_room(self, request: Request, plan: StepPlan, shares: Shares, run_ahead: bool) -> PlanPart | None:
        """A running request's part, for which blocks have run out; None if it has to wait, or gives way itself."""
        part = None
        while part is None:
            plan.bound_by = "blocks"
            if run_ahead and any(r.in_flight for r in self.running):
                plan.short = True  # who is to give way shows when all steps are committed
                return None
            candidates = [r for r in self.running if not r.in_flight]
            victim = self.policy.victim(candidates)
            if victim not in candidates:
                raise misnamed(self.policy, "victim", victim)
            self._take_back(victim, plan, shares)
            if victim is request:
                return None
            part = self._part(request, shares.room(request))
        return part

    def _take_back(self, victim: Request, plan: StepPlan, shares: Shares) -> None:
        """A running request gives way, with what it was to have in this step."""
        if victim not in shares.parts:  # else its blocks wait for copies
            plan.saves += self.host.save(victim, self.kv.block_size)
        self.preempt(victim)
        plan.preempted.append(victim)
        shares.take_back(victim)

    def _load(self, request: Request) -> list[tuple[int, int, int]]:
        """What a request that gave way has saved comes back, if it is still good and there is room for it."""
        saved = self.host.of(request)
        if saved is None:
            return []
        if (saved.epoch, saved.regime) != (self.kv.epoch, request.regime):
            self.host.drop(request)  # the weights are others by now
            return []
        loads = self.kv.load(request, saved)
        if loads:
            request.num_computed = saved.num_computed
        return loads or []

    def preempt(self, request: Request) -> None:
        """Back to the queue with no blocks; what it has generated is kept and computed again with its prompt."""
        self.kv.free(request)
        self.running.remove(request)
        request.num_computed = request.in_flight = request.ahead = 0
        request.status = Status.WAITING
        request.metrics.preemptions += 1
        self.preemptions += 1
        self.add(request)

    def _part(self, request: Request, left: int) -> PlanPart | None:
        """This request's share of at most `left` tokens, with the blocks for it; None if they are not to be had."""
        drafts: list[int] = []
        known = len(request.token_ids) + request.ahead
        pending = known - request.num_computed
        decoding = pending == 1 and known > len(request.prompt_ids)
        count, rows = min(pending, left), 0
        if decoding:
            if self.drafts is not None and request.params.takes_drafts:
                room = min(left - 1, request.max_tokens - len(request.token_ids))
                drafts = self.drafts.propose(request, room)[:room] if room > 0 else []
        else:
            count = min(count, self.config.prefill_chunk)
            if count > 1 and pending - count == 1:
                count -= 1  # recurrent layers compute a token that comes alone as generated ones, not as a prompt's
            rows = prompt_rows(request, request.num_computed, count)
        allocation = self.kv.allocate(request, count + len(drafts))
        if allocation is None:
            return None
        samples = 1 + len(drafts) if count == pending else 0
        start, num_tokens = request.num_computed, count + len(drafts)
        return PlanPart(request, start, num_tokens, samples, drafts, decoding, rows, *allocation)


def _goes_on(request: Request) -> bool:
    """Whether a request will be alive after the steps that it is in, as far as is known before their tokens are."""
    known = len(request.token_ids) - len(request.prompt_ids) + request.ahead
    return not request.cancelled and known < max(1, request.params.max_new_tokens)
