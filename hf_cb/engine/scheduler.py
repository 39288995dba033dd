"""Who runs this step, under three budgets: query tokens, KV blocks, requests."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection

from hf_cb.core import Request, Status
from hf_cb.engine.host_blocks import HostBlocks
from hf_cb.engine.kv_cache import KVCache
from hf_cb.engine.logprobs import SCORED_ROWS, prompt_rows
from hf_cb.engine.policies import Fifo, Policy
from hf_cb.engine.speculation import DraftSource, NoDrafts
from hf_cb.sizes import ResolvedConfig
from hf_cb.steps import PlanPart, StepPlan


class Scheduler:
    """Keeps the waiting and the running requests, both in order of arrival, and plans one step at a time."""

    def __init__(
        self, config: ResolvedConfig, kv: KVCache, policy: Policy | None = None, drafts: DraftSource | None = None
    ) -> None:
        self.config = config
        self.kv = kv
        self.policy = policy or Fifo()
        self.drafts = drafts or NoDrafts()
        self.host = HostBlocks(config.host_blocks)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.arrival)

    def remove(self, request: Request) -> None:
        """A request has ended: its blocks go back."""
        self.kv.free(request)
        self.host.drop(request)
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        request.status = Status.FINISHED

    def plan(
        self, only: Collection[Request] | None = None, budget: int | None = None, run_ahead: bool = False
    ) -> StepPlan:
        """The next step, of these requests only, with at most `budget` tokens. Requests of a step that is not committed
        yet are left out, unless they may `run_ahead`: on a token that is sampled and not yet read."""
        plan = StepPlan()
        self.host.begin_step()
        left = allowed = budget or self.config.max_batch_tokens
        rows = SCORED_ROWS
        planned: dict[Request, PlanPart] = {}
        running, waiting = list(self.running), list(self.waiting)
        if only is not None:
            running, waiting = [r for r in running if r in only], [r for r in waiting if r in only]
        unasked = len(running)
        for request in self.policy.order(running, waiting):
            closed = plan.bound_by in ("blocks", "requests")
            if closed and not unasked:
                break  # only new requests are left, perhaps thousands, and none may start
            unasked -= request.status is Status.RUNNING
            if (request.in_flight and not (run_ahead and _goes_on(request))) or request in plan.preempted:
                continue
            if left == 0:
                plan.bound_by = plan.bound_by or "tokens"
                break
            room = min(left, rows) if request.scores_prompt else left
            if room == 0:
                continue  # its turn comes in the next step
            gone = len(plan.preempted)
            if request.status is Status.WAITING:
                # a new request never takes blocks from a running one, and none behind it overtakes
                if closed:
                    continue
                part = self._admit(request, room, plan)
            else:
                part = self._continue(request, room, plan, planned, run_ahead)
            if part is not None:
                planned[request] = part
                left -= part.num_tokens
                rows -= part.prompt_rows
            if len(plan.preempted) > gone:  # shares were taken back
                left = allowed - sum(p.num_tokens for p in planned.values())
                rows = SCORED_ROWS - sum(p.prompt_rows for p in planned.values())
            if left == 0 and part is not None and not part.samples:
                plan.bound_by = plan.bound_by or "tokens"
        plan.parts = list(planned.values())
        for part in plan.parts:
            part.request.in_flight += part.num_tokens
            part.request.num_computed += part.num_tokens
            part.request.ahead += part.samples > 0
        return plan

    def _admit(self, request: Request, left: int, plan: StepPlan) -> PlanPart | None:
        if len(self.running) >= self.config.max_num_seqs:
            plan.bound_by = "requests"
            return None
        source = request.fork_of
        if (
            source is not None
            and (self.kv.forks or source.scores_prompt)
            and source.status is not Status.FINISHED
            and source.pending > 0
            and not source.num_output
        ):
            return None  # its prompt is about to be computed by the request it is a fork of
        loads = self._load(request)
        if not loads and source is not None and source.status is Status.RUNNING and not request.num_output:
            request.num_computed = self.kv.fork(request, source, len(request.prompt_ids) - 1)
        request.num_computed = request.num_computed or self.kv.hit(request)
        part = self._part(request, left)
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
        insort(self.running, request, key=lambda r: r.arrival)
        request.status = Status.RUNNING
        plan.admitted.append(request)
        return part

    def _continue(
        self, request: Request, left: int, plan: StepPlan, planned: dict[Request, PlanPart], run_ahead: bool
    ) -> PlanPart | None:
        while (part := self._part(request, left)) is None:
            plan.bound_by = "blocks"
            if run_ahead and any(r.in_flight for r in self.running):
                plan.short = True  # who is to give way shows when all steps are committed
                return None
            victim = self.policy.victim([r for r in self.running if not r.in_flight])
            if victim not in planned:  # else its blocks wait for copies
                plan.saves += self.host.save(victim, self.kv.block_size)
            self.preempt(victim)
            plan.preempted.append(victim)
            planned.pop(victim, None)
            if victim is request:
                return None
        return part

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
        count = min(request.pending, left)
        if request.is_decoding:
            room = min(left - 1, request.max_tokens - len(request.token_ids))
            drafts = self.drafts.propose(request, room)[:room] if room > 0 else []
        elif request.pending > 1:
            count = min(count, self.config.prefill_chunk)
            if count > 1 and request.pending - count == 1:
                count -= 1  # recurrent layers compute a token that comes alone as generated ones, not as a prompt's
        allocation = self.kv.allocate(request, count + len(drafts))
        if allocation is None:
            return None
        return PlanPart(
            request,
            start=request.num_computed,
            num_tokens=count + len(drafts),
            samples=1 + len(drafts) if count == request.pending else 0,
            drafts=drafts,
            was_decoding=request.is_decoding,
            new_blocks=allocation.new_blocks,
            copies=allocation.copies,
            prompt_rows=prompt_rows(request, request.num_computed, count),
        )


def _goes_on(request: Request) -> bool:
    """Whether a request will be alive after the steps that it is in, as far as is known before their tokens are."""
    return not request.cancelled and request.num_output + request.ahead < max(1, request.params.max_new_tokens)
