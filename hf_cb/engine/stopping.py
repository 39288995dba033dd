"""When a request has had enough."""

from __future__ import annotations

from hf_cb.core import FinishReason, Request


def check_stop(request: Request, now: float) -> FinishReason | None:
    """Why a request ends after its newest token, or None. Custom checks see prompt and output, as in `generate`. What
    has stopped it becomes its `stop_reason`; a stop string that is an end-of-sequence token too is the string."""
    params = request.params
    for check in params.stop_checks:
        if found := check(request.token_ids):
            request.stop_reason = found if isinstance(found, str) else None
            return "stop"
    if request.token_ids[-1] in params.eos_token_ids:
        request.stop_reason = request.token_ids[-1]
        return "stop"
    if request.num_output >= params.max_new_tokens:
        return "length"
    return "timeout" if is_late(request, now) else None


def is_late(request: Request, now: float) -> bool:
    """Whether a request is past its deadline, has waited too long for its start, or has had its `max_time`."""
    if request.start_by is not None and request.started is None and now > request.start_by:
        return True
    if request.deadline is not None and now > request.deadline:
        return True
    max_time = request.params.max_time
    return max_time is not None and now - request.created > max_time


def end_times(request: Request) -> list[float]:
    """The times at which `is_late` may become true, on time.perf_counter()."""
    max_time = request.params.max_time
    times = (request.deadline, request.start_by, None if max_time is None else request.created + max_time)
    return [t for t in times if t is not None]
