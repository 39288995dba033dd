"""What a step has computed becomes part of its requests, and those that have had enough go out."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from hf_cb.core import FinishReason, Request, Status, Update
from hf_cb.engine import records
from hf_cb.engine.kv_cache import KVCache
from hf_cb.engine.runner import Runner
from hf_cb.engine.sampler import Sampled
from hf_cb.engine.scheduler import Scheduler
from hf_cb.engine.stopping import check_stop, is_late
from hf_cb.errors import describe
from hf_cb.steps import PlanPart


class Commits:
    """The end of a step, request by request, and the end of a request."""

    def __init__(self, scheduler: Scheduler, kv: KVCache, runner: Runner, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.runner = runner
        self.clock = clock

    def part(
        self, part: PlanPart, sampled: Sequence[Sampled], now: float, scores: Sequence[dict[int, float]] = ()
    ) -> Update | None:
        """One request's share of a step, with the log-probabilities of its prompt's tokens that were asked for; None if
        it had ended before this step was committed."""
        request, upto = part.request, part.start + part.num_tokens - len(part.drafts)
        if request.status is Status.FINISHED:
            return None
        request.in_flight -= part.num_tokens
        request.ahead -= part.samples > 0
        if request.cancelled:
            self.finish(request, "cancelled")
            return Update(request, [])
        if scores:  # sequences of one prompt share them, and may have computed some twice
            first = upto - part.samples - part.prompt_rows
            request.prompt_logprobs += scores[len(request.prompt_logprobs) - first :]
        new_ids: list[int] = []
        reason: FinishReason | None = None
        for i, found in enumerate(sampled):
            failure = found.exception
            if failure is None and not request.params.max_new_tokens:
                reason = "length"  # only its prompt was wanted
            elif failure is None:
                new_ids.append(found.token_id)
                try:
                    reason = self._append(request, found, now)
                except Exception as error:  # a request's own stop check: it ends that request and nobody else's
                    failure = error
                except BaseException as error:  # this thread gets no signals: it is the stop check's own
                    failure = RuntimeError(f"A stop check of this request raised {describe(error)}.")
            if failure is not None:
                self.fail(request, failure)
                return Update(request, new_ids)
            if reason is not None or i == len(part.drafts) or part.drafts[i] != found.token_id:
                break
            upto += 1  # the draft was right, so its keys and values are too
        request.num_computed -= part.start + part.num_tokens - upto  # what wrong drafts had computed
        self.kv.publish(request, part.start, upto)
        if not sampled and is_late(request, now):
            reason = "timeout"
        if reason is not None:
            self.finish(request, reason)
        elif (regime := self.runner.key_regime(request)) != request.regime:
            self.kv.restart(request, regime)
            self.runner.forget(request)
        return Update(request, new_ids)

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request with its error."""
        traceback.clear_frames(error.__traceback__)  # they hold a step's logits
        request.exception = error
        self.finish(request, "error")

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request: its blocks go back, its metrics are filled."""
        self.take_out(request)
        request.finish_reason = reason
        request.finished = self.clock()
        records.fill_metrics(request)

    def take_out(self, request: Request) -> None:
        """Nothing of ours holds the request any more."""
        request.in_flight = request.ahead = 0
        self.scheduler.remove(request)
        self.runner.forget(request)
        # processors may hold much, and a handle may keep the request for long
        request.params = replace(request.params, process=None, penalties=None, stop_checks=())
        request.token_counts = None

    def _append(self, request: Request, found: Sampled, now: float) -> FinishReason | None:
        request.token_ids.append(found.token_id)
        request.timestamps.append(now)
        if request.first_token is None:
            request.first_token = now
        if found.logprob is not None:
            request.logprobs.append(found.logprob)
        if found.top is not None:
            request.top_logprobs.append(found.top)
        if found.logits is not None:
            request.logits.append(found.logits)
        if found.scores is not None:
            request.scores.append(found.scores)
        return check_stop(request, now)
