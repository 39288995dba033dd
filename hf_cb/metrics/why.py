"""Where one request's time went, in a sentence: read off the ring of StepRecords, not off a log."""

from __future__ import annotations

from collections.abc import Sequence

from hf_cb.core import Request, Status
from hf_cb.errors import describe
from hf_cb.metrics.causes import BREATH_S, Decoding, Stall, Wait, decoding_of, recomputed, wait_of
from hf_cb.policies import Policy
from hf_cb.steps import Share, StepRecord
from hf_cb.words import duration

MENTIONED = 0.05  # causes below this share of a wait, or of the time between first and last token, are left out
STALLS = {
    "left out": "as steps had no room for it",
    "idle": "as no step ran",
    "plan": "by slow planning",
    "build": "by slow building of steps",
    "forward": "by slow forwards",
    "sample": "by slow sampling",
    "commit": "by slow commits (somebody's stop check, perhaps)",
}


def why(
    request: Request,
    records: Sequence[StepRecord],
    now: float,
    policy: Policy | None = None,
    error: BaseException | None = None,
) -> str:
    """Queue, prompt, tokens, stalls and preemptions of a request, each with its cause.

    Args:
        request: running or ended.
        records: the engine's ring, oldest first. What it has forgotten is told from the request's own metrics, without
            causes.
        now: on time.perf_counter(); of a request that has ended, the moment counts at which it did.
        policy: for what it held back.
        error: what ended it, if its engine did not live to do so.
    """
    end = request.finished or now
    seen = [r for r in records if r.ended > request.created and r.started <= end]
    own = [(r, share) for r in seen if (share := r.share_of(request.request_id)) is not None]
    clauses = [
        _queued(request, seen, end, policy),
        _prefilled(request, own, end),
        _decoded(request, seen),
        _preempted(request, seen, own, end, policy),
        _forgotten(request, records),
    ]
    return f"{_head(request, end, error)}: {'; '.join(clause for clause in clauses if clause)}."


def _head(request: Request, end: float, error: BaseException | None) -> str:
    name, took = request.request_id, duration(end - request.created)
    error = error or request.exception
    if error is not None:
        return f"{name} failed after {took} ({describe(error)})"
    if request.finish_reason is None:
        waits = request.status is Status.WAITING
        doing = "waits" if waits else "decodes" if request.first_token else "is in its prompt"
        return f"{name} {doing}, {took} after it came"
    ends = {
        "stop": "stopped",
        "length": "reached its length",
        "cancelled": "was cancelled",
        "timeout": "ran out of time",
    }
    return f"{name} {ends.get(request.finish_reason, 'ended')} after {took}"


def _queued(request: Request, seen: Sequence[StepRecord], end: float, policy: Policy | None) -> str:
    until = request.started or end
    verb = "queued" if request.started or request.finish_reason else "queued so far"
    known = max(request.created, seen[0].started) if seen and seen[0].step > 0 else request.created
    if known >= until:  # by then the ring has forgotten it
        return f"{verb} {duration(until - request.created)}"
    reason = _causes(wait_of(seen, request.created, until), request, policy)
    return f"{verb} {duration(until - request.created)}{reason}"


def _causes(wait: Wait, request: Request, policy: Policy | None) -> str:
    """The reasons of a wait, the longest first; none for one that is hardly there."""
    found = [(c, s) for c, s in wait.seconds.most_common() if s >= MENTIONED * wait.total]
    found = [(c, s) for c, s in found if c != "idle" or s >= BREATH_S]
    if wait.total < 1e-3 or not found:
        return ""
    words = {cause: _cause(cause, wait.shown_by.get(cause), request, policy) for cause, _ in found}
    if len(found) == 1 and found[0][1] > 0.9 * wait.total:
        return f" because {words[found[0][0]]}"
    return f" ({', '.join(f'{duration(s)} because {words[cause]}' for cause, s in found)})"


def _cause(cause: str, record: StepRecord | None, request: Request, policy: Policy | None) -> str:
    if record is not None and cause == "blocks":
        used = f"{record.blocks_used} of {record.blocks_allowed}"
        full = record.blocks_used == record.blocks_allowed
        return f"KV blocks were full ({used})" if full else f"too few KV blocks were free ({used} in use)"
    if record is not None and cause == "tokens":
        return f"the steps were full ({record.query_tokens} of {record.tokens_allowed} query tokens)"
    if record is not None and cause == "requests":
        return f"all places were taken ({record.running} of {record.requests_allowed} requests)"
    if cause == "policy" and request.fork_of is not None:
        return f"the prompt that it shares with {request.fork_of.request_id} was being computed"
    if cause == "policy":
        return f"{_named(policy)} held it back, with room in every budget"
    if cause == "recovery":
        return "a step had raised and ran again in parts"
    if cause == "step":
        return "a step was running when it came"
    held = f"{_named(policy)} held all back, or " if policy is not None and policy.may_hold_back else ""
    return f"no step ran ({held}a manager not started or paused, or a model in training)"


def _named(policy: Policy | None) -> str:
    return "the policy" if policy is None else f"the policy ({policy.name})"


def _prefilled(request: Request, own: Sequence[tuple[StepRecord, Share]], end: float) -> str:
    if request.started is None:
        return ""
    steps: list[tuple[StepRecord, Share]] = []
    computed = reached = 0
    for record, share in own:
        if share.decoding:
            break
        if share.start + share.num_tokens > reached:
            steps.append((record, share))
            computed += share.start + share.num_tokens - max(reached, share.start)
            reached = share.start + share.num_tokens
        if share.new_tokens:
            break
    took = duration((request.first_token or end) - request.started)
    cached = request.metrics.cached_tokens
    found = f", {cached} more found in the prefix cache" if cached else ""
    whole = len(request.prompt_ids) - cached
    if not steps or (request.first_token and computed != whole and not request.metrics.preemptions):
        return f"prefill of {_tokens(whole)}{found} ({took})"  # the ring has forgotten some of it
    amount = _tokens(whole) if request.first_token else f"{computed} of {_tokens(whole)}"
    if len(steps) == 1:
        return f"prefill of {amount} in 1 step ({took}){found}"
    return f"prefill of {amount} in {len(steps)} steps ({took}{_split(request, steps)}){found}"


def _split(request: Request, steps: Sequence[tuple[StepRecord, Share]]) -> str:
    """Why a prompt took several steps."""
    cut = steps[:-1] if request.first_token else steps
    full = [record for record, _ in cut if record.bound_by == "tokens"]
    if not full:
        return f", at most {max(share.num_tokens for _, share in cut)} a step"
    others = sorted({s.request_id for r in full for s in r.shares} - {request.request_id})
    beside = f", beside {_names(others)}" if others else ""
    return f", as the steps were full: {full[-1].query_tokens} of {full[-1].tokens_allowed} query tokens{beside}"


def _decoded(request: Request, seen: Sequence[StepRecord]) -> str:
    times = list(request.timestamps)
    if not times:
        return ""
    count = _tokens(len(times))
    found = decoding_of(request.request_id, times, seen)
    if found is None:
        mean = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        return f"{count} at {duration(mean)} each" if mean else count
    each = found.usual_s * (len(set(times)) - 1) / (len(times) - 1)  # drafts come several at a time
    return f"{count} at {duration(each)} each{_stalled(found, times[-1] - times[0])}"


def _stalled(found: Decoding, whole: float) -> str:
    stalls = sorted(found.stalls.items(), key=lambda item: -item[1].seconds)
    stalls = [(cause, stall) for cause, stall in stalls if stall.seconds >= MENTIONED * whole]
    words = [f"stalled {duration(s.seconds)} {_times(s.times)} {_by(cause, s)}" for cause, s in stalls]
    return "".join(f", {word}" for word in words)


def _by(cause: str, stall: Stall) -> str:
    if cause != "prompts":
        return STALLS[cause]
    names = [name for name, _ in stall.names.most_common()]
    return f"by the prompt{'s' if len(names) > 1 else ''} of {_names(names)}"


def _preempted(
    request: Request,
    seen: Sequence[StepRecord],
    own: Sequence[tuple[StepRecord, Share]],
    end: float,
    policy: Policy | None,
) -> str:
    times = request.metrics.preemptions
    if not times:
        return ""
    wait = Wait()
    for begin in (r.started for r in seen if request.request_id in r.preempted_ids):
        back = next((record.started for record, _ in own if record.started > begin), end)
        wait.merge(wait_of(seen, begin, back))
    again = recomputed(share for _, share in own)
    waited = f"waited {duration(wait.total)}{_causes(wait, request, policy)}, " if wait.total else ""
    return f"preempted {_times(times)} ({waited}recomputed {_tokens(again)})"


def _forgotten(request: Request, records: Sequence[StepRecord]) -> str:
    """Whether the ring begins after the request did."""
    if not records or records[0].step == 0 or records[0].started <= request.created:
        return ""
    return f"what came before step {records[0].step} is no longer on record (trace_steps keeps {len(records)})"


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _names(names: Sequence[str]) -> str:
    shown = list(names)
    if len(shown) > 4:
        return f"{', '.join(shown[:3])} and {len(shown) - 3} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
