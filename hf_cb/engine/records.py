"""What is written down about a step and about a request's life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_cb.core import Request
from hf_cb.steps import StepPlan


def of_plan(plan: StepPlan, times: Sequence[float]) -> dict[str, Any]:
    """The fields of a StepRecord that a plan and the clock tell: before plan, build, forward, sample, and after it."""
    return {
        "started": times[0],
        "plan_s": times[1] - times[0],
        "build_s": times[2] - times[1],
        "forward_s": times[3] - times[2],
        "sample_s": times[4] - times[3],
        "decode_tokens": sum(p.num_tokens for p in plan.parts if p.was_decoding),
        "prefill_tokens": sum(p.num_tokens for p in plan.parts if not p.was_decoding),
        "requests": len(plan.parts),
        "preempted": len(plan.preempted),
        "bound_by": plan.bound_by,
    }


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
