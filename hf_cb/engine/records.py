"""What is written down about a step and about a request's life."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from hf_cb.core import Request, Update
from hf_cb.engine.recovery import Recovery
from hf_cb.engine.scheduler import Scheduler
from hf_cb.steps import Entry, Exit, StepPlan, StepRecord


def state_of(scheduler: Scheduler, recovery: Recovery) -> dict[str, Any]:
    """How things stand before a step is committed."""
    pool, config = scheduler.kv.pool, scheduler.config
    return {
        "tokens_allowed": recovery.budget or config.max_batch_tokens,
        "blocks_used": pool.num_held,
        "blocks_cached": pool.num_cached,
        "blocks_allowed": pool.num_blocks,
        "running": len(scheduler.running),
        "requests_allowed": config.max_num_seqs,
        "waiting": len(scheduler.waiting),
        "recovering": bool(recovery.groups),
    }


def record_of(
    plan: StepPlan,
    times: Sequence[float],
    began: float,
    found: Sequence[Update | None],
    *,
    commit_s: float,
    **state: Any,
) -> StepRecord:
    """A step's record: what the plan tells, the clock (before plan, build, forward, sample, after it, and as its commit
    began), what each part of the plan changed, and the `state` of the engine."""
    numbers: list[int] = []
    for part, update in zip(plan.parts, found, strict=True):
        new = 0 if update is None else len(update.new_ids)
        numbers += (part.start, part.num_tokens, new, part.was_decoding)
    decode_tokens = sum([p.num_tokens for p in plan.parts if p.was_decoding])
    ended = [u.request for u in found if u is not None and u.finished]
    return StepRecord(
        started=times[0],
        ended=began + commit_s,
        commit_s=commit_s,
        plan_s=times[1] - times[0],
        build_s=times[2] - times[1],
        forward_s=times[3] - times[2],
        sample_s=times[4] - times[3],
        decode_tokens=decode_tokens,
        prefill_tokens=plan.num_tokens - decode_tokens,
        requests=len(plan.parts),
        bound_by=plan.bound_by,
        request_ids=tuple([part.request.request_id for part in plan.parts]),
        numbers=array("i", numbers),
        admitted=tuple([Entry(r.request_id, r.created) for r in plan.admitted]),
        preempted_ids=tuple([r.request_id for r in plan.preempted]),
        finished=tuple([Exit(r.request_id, r.finish_reason or "") for r in ended]),
        **state,
    )


def fill_metrics(request: Request) -> None:
    """A request has ended: where its time went."""
    assert request.finished is not None
    m = request.metrics
    m.e2e_s = request.finished - request.created
    m.queue_s = (request.finished if request.started is None else request.started) - request.created
    if request.first_token is not None and request.started is not None:
        m.ttft_s = request.first_token - request.created
        m.prefill_s = request.first_token - request.started
    if request.num_output > 1:
        m.itl_s = (request.timestamps[-1] - request.timestamps[0]) / (request.num_output - 1)
