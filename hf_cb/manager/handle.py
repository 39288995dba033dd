"""What a caller holds for a request: iterate over its tokens, wait for its result, cancel it; from any thread or event
loop.

The engine's thread only appends token ids here. A reader keeps its own place, so a slow one gets several steps' tokens
in one delta and nothing queues up; and text is made in the reader's thread, never in the engine's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_cb.core import Delta, GenerationOutput, Request, RequestMetrics
from hf_cb.errors import RequestFailedError
from hf_cb.text.detokenizer import Detokenizer, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Called by the engine's thread with a step's news: on the event loop if there is one, else at once: be quick
Waker = tuple[asyncio.AbstractEventLoop | None, Callable[[], None]]


class Stream:
    """One sequence as its readers see it. Written by the engine's thread, under the handle's condition."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.output: GenerationOutput | None = None


class Handle:
    """A submitted request, with one sequence or several (`num_return_sequences`)."""

    def __init__(
        self,
        requests: list[Request],
        cancel: Callable[[], None],
        tokenizer: PreTrainedTokenizerBase | None = None,
        index: int = 0,
    ) -> None:
        self.request_id = requests[0].request_id
        self.index = index
        self.streams = [Stream(r.request_id) for r in requests]
        self._requests = requests
        self._cancel = cancel
        self._tokenizer = tokenizer
        self._changed = threading.Condition()
        self._wakers: list[Waker] = []

    @property
    def done(self) -> bool:
        return all(s.output is not None for s in self.streams)

    @property
    def metrics(self) -> RequestMetrics:
        """The first sequence's metrics, filled as far as they are known."""
        return self._requests[0].metrics

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the request is done, after at most `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.done, timeout)

    def cancel(self) -> None:
        """Ends the request within a step; its result then says "cancelled". Harmless once it has ended."""
        self._cancel()

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """The first sequence's result, waited for at most `timeout` seconds.

        Raises:
            TimeoutError: not done in time (the request goes on).
            The request's own error, if it ended with one.
        """
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[GenerationOutput]:
        """All sequences' results; raises as `result` does."""
        outputs = self.outputs(timeout)
        for output in outputs:
            if output.error is not None:
                raise output.exception or RequestFailedError(output.error)
        return outputs

    def outputs(self, timeout: float | None = None) -> list[GenerationOutput]:
        """All sequences' results, failed ones too, which say so in `error`; TimeoutError if not done in time."""
        if not self.wait(timeout):
            raise TimeoutError(f"Request {self.request_id} is not done after {timeout} s.")
        return self._finished()

    def __iter__(self) -> Iterator[Delta]:
        """Deltas as they come, from the first token on; ends by itself; raises the request's error if it has one."""
        reader = Reader(self)
        while True:
            with self._changed:
                self._changed.wait_for(reader.has_news)
            for delta in reader.read():
                yield delta
                self._raise_error_of(delta)
            if reader.at_end:
                return

    async def __aiter__(self) -> AsyncIterator[Delta]:
        reader = Reader(self)
        with _waking(self) as event:
            while True:
                event.clear()
                for delta in reader.read():
                    yield delta
                    self._raise_error_of(delta)
                if reader.at_end:
                    return
                await event.wait()

    def __await__(self) -> Generator[Any, None, GenerationOutput]:
        return self._wait().__await__()

    async def _wait(self) -> GenerationOutput:
        with _waking(self) as event:
            while not self.done:
                event.clear()
                if not self.done:
                    await event.wait()
        return self.result(timeout=0)

    def _raise_error_of(self, delta: Delta) -> None:
        if delta.error is not None:
            output = next(s.output for s in self.streams if s.request_id == delta.request_id)
            raise (output and output.exception) or RequestFailedError(delta.error)

    def add_waker(self, waker: Waker) -> None:
        """From now on, `waker` is called with every step's news."""
        with self._changed:
            self._wakers.append(waker)

    def remove_waker(self, waker: Waker) -> None:
        with self._changed:
            self._wakers.remove(waker)

    def _finished(self) -> list[GenerationOutput]:
        outputs = [s.output for s in self.streams if s.output is not None]
        for output in outputs:
            if output.text is None and self._tokenizer is not None:
                output.text = decode(self._tokenizer, output.generated_tokens)
        return outputs

    # ------------------------------------------------------------------------------------------ by the engine's thread

    def push(self, request: Request, new_ids: list[int], output: GenerationOutput | None) -> list[Waker]:
        """Adds a step's news; returns who is to be woken."""
        stream = self.streams[self._requests.index(request)]
        with self._changed:
            stream.token_ids.extend(new_ids)
            if output is not None and stream.output is None:
                output.index = self.index
                stream.output = output
            self._changed.notify_all()
            return list(self._wakers)


@contextmanager
def _waking(handle: Handle) -> Iterator[asyncio.Event]:
    """While open, every step's news set the event, on the event loop that runs now."""
    event = asyncio.Event()
    waker: Waker = (asyncio.get_running_loop(), event.set)
    handle.add_waker(waker)
    try:
        yield event
    finally:
        handle.remove_waker(waker)


class Reader:
    """One reader's place in a handle's streams, and its detokenizers."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.places = [0] * len(handle.streams)
        self.ended = [False] * len(handle.streams)
        tokenizer = handle._tokenizer
        self.detokenizers = [None if tokenizer is None else Detokenizer(tokenizer) for _ in handle.streams]

    @property
    def at_end(self) -> bool:
        return all(self.ended)

    def has_news(self) -> bool:
        return any(
            len(s.token_ids) > place or (s.output is not None and not ended)
            for s, place, ended in zip(self.handle.streams, self.places, self.ended, strict=True)
        )

    def read(self) -> Iterator[Delta]:
        """What is new since the last call, at most one delta a sequence; a failed sequence's last one has its error."""
        for i, stream in enumerate(self.handle.streams):
            if self.ended[i]:
                continue
            with self.handle._changed:
                new, output = stream.token_ids[self.places[i] :], stream.output
            self.places[i] += len(new)
            detokenizer = self.detokenizers[i]
            text = detokenizer.push(new) if detokenizer is not None else ""
            if output is not None:
                self.ended[i] = True
                text += detokenizer.flush() if detokenizer is not None else ""
            if output is not None:
                yield Delta(stream.request_id, self.handle.index, new, text, output.finish_reason, output.error)
            elif new:
                yield Delta(stream.request_id, self.handle.index, new, text)


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
        error=None if error is None else f"{type(error).__name__}: {error}",
        status=status,
        created_time=request.created,
        lifespan=(request.started or -1, request.finished or (time.perf_counter() if error else -1)),
        timestamps=list(request.timestamps),
        finish_reason="error" if error is not None else request.finish_reason,
        metrics=request.metrics,
        exception=error if isinstance(error, Exception) else None,
    )
