"""A request's news, between the engine's thread, which only appends token ids here, and whoever reads them."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from hf_cb.core import GenerationOutput, Request
from hf_cb.errors import describe
from hf_cb.manager.bell import Bell

# Called by the engine's thread with a step's news: on the event loop if there is one, else at once: be quick
Waker = tuple[asyncio.AbstractEventLoop | None, Callable[[], None]]


class Stream:
    """One sequence as its readers see it. Written by the engine's thread, tokens first: who finds an output, and then
    looks at the tokens, has them all."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.output: GenerationOutput | None = None


class Guard(weakref.ref[Any]):
    """What `tell` is called with once the handle is gone: it has the requests that nobody waits for any more. A weak
    reference, as the Python code of a `__del__` would swallow a Ctrl-C."""

    requests: list[Request]

    def __new__(cls, handle: object, tell: Callable[[Guard], None], requests: list[Request]) -> Guard:
        guard = super().__new__(cls, handle, tell)
        guard.requests = requests
        return guard

    def __init__(self, handle: object, tell: Callable[[Guard], None], requests: list[Request]) -> None:
        super().__init__(handle, tell)  # type: ignore[call-arg]


class Mailbox:
    """The streams of one submission. The router holds it as long as it is alive; a caller's handle comes and goes."""

    def __init__(self, requests: list[Request], index: int = 0) -> None:
        self.requests = requests
        self.index = index
        self.streams = [Stream(r.request_id) for r in requests]
        self.guard: Guard | None = None  # of the handle, until the requests have ended
        self._bell = Bell()
        self._lock = threading.RLock()  # for changing the wakers; a garbage collection inside may end up here again
        self._wakers: tuple[Waker, ...] = ()

    @property
    def done(self) -> bool:
        return all(s.output is not None for s in self.streams)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether all streams have ended, after at most `timeout` seconds."""
        return self.wait_for(lambda: self.done, timeout)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until news have made `predicate` true, for at most `timeout` seconds; what it says then."""
        return self._bell.wait_for(predicate, timeout)

    def add_waker(self, waker: Waker) -> None:
        """From now on, `waker` is called with every step's news."""
        with self._lock:
            self._wakers += (waker,)

    def remove_waker(self, waker: Waker) -> None:
        with self._lock:
            wakers = list(self._wakers)
            wakers.remove(waker)
            self._wakers = tuple(wakers)

    def push(self, request: Request, new_ids: list[int], output: GenerationOutput | None) -> tuple[Waker, ...]:
        """By the engine's thread: adds a step's news; returns who is to be woken. Hundreds of these lie between two
        steps, so no lock is taken."""
        stream = self.streams[self.requests.index(request)]
        stream.token_ids.extend(new_ids)
        if output is not None and stream.output is None:
            output.index = self.index
            stream.output = output
            if self.done:
                self.guard = None
        self._bell.ring()
        return self._wakers


def make_output(request: Request, error: BaseException | None = None) -> GenerationOutput:
    """A request's state as a GenerationOutput: the final one if it has ended, else the tokens so far."""
    from transformers.generation.continuous_batching.requests import RequestStatus

    error = error or request.exception
    if error is not None:
        status = RequestStatus.FAILED
    elif request.finish_reason is not None:
        status = RequestStatus.FINISHED
    else:
        status = RequestStatus.DECODING if request.num_output else RequestStatus.PREFILLING
    return GenerationOutput(
        request_id=request.request_id,
        prompt_ids=list(request.prompt_ids),
        generated_tokens=request.output_ids,
        logprobs=list(request.logprobs),
        error=None if error is None else describe(error),
        status=status,
        created_time=request.created,
        lifespan=(request.started or -1, request.finished or (time.perf_counter() if error else -1)),
        timestamps=list(request.timestamps),
        finish_reason="error" if error is not None else request.finish_reason,
        stop_reason=request.stop_reason,
        **_told(request),
        metrics=request.metrics,
        exception=error if isinstance(error, Exception) else None,
    )


def _told(request: Request) -> dict[str, Any]:
    """What it has asked for besides tokens."""
    params = request.params
    scored = len(request.prompt_logprobs) >= len(request.prompt_ids) - 1
    return {
        "top_logprobs": list(request.top_logprobs) if params.top_logprobs is not None else None,
        "prompt_logprobs": [None, *request.prompt_logprobs] if params.prompt_logprobs is not None and scored else None,
        "scores": tuple(request.scores) if params.output_scores else None,
        "logits": tuple(request.logits) if params.output_logits else None,
    }
