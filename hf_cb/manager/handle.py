"""What a caller holds for a request: iterate over its tokens, wait for its result, cancel it; from any thread or event
loop.

A reader keeps its own place in the mailbox, so a slow one gets several steps' tokens in one delta and nothing queues
up; and text is made in the reader's thread, never in the engine's. A handle that nobody holds any more cancels its
request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from hf_cb.core import Delta, GenerationOutput, Request, RequestMetrics
from hf_cb.errors import RequestFailedError
from hf_cb.html import card, result_card, side_by_side
from hf_cb.manager.mailbox import Guard, Mailbox, Waker
from hf_cb.text.rendering import Rendering


class Handle:
    """A submitted request, with one sequence or several (`num_return_sequences`).

    Args:
        mailbox: where its news arrive.
        cancel: ends the request within a step.
        dropped: called with the mailbox's guard if the handle goes before its requests have ended: anywhere, perhaps
            while locks are held. Should be C code, as a Ctrl-C in Python's would be swallowed.
        check: raises where waiting would never end.
        explain: says of one of its requests where the time went.
        rendering: for text.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        cancel: Callable[[], None],
        dropped: Callable[[Guard], None],
        check: Callable[[], None],
        explain: Callable[[Request, GenerationOutput | None], str],
        rendering: Rendering | None = None,
    ) -> None:
        self.mailbox = mailbox
        self._cancel = cancel
        self._check = check
        self._explain = explain
        self.rendering = rendering
        mailbox.guard = Guard(self, dropped, mailbox.requests)

    @property
    def request_id(self) -> str:
        return self.mailbox.streams[0].request_id

    @property
    def index(self) -> int:
        """The place of its prompt in the inputs of a call."""
        return self.mailbox.index

    @property
    def num_sequences(self) -> int:
        return len(self.mailbox.streams)

    @property
    def done(self) -> bool:
        return self.mailbox.done

    @property
    def metrics(self) -> RequestMetrics:
        """The first sequence's metrics, filled as far as they are known."""
        return self.mailbox.requests[0].metrics

    def why(self) -> str:
        """Where the time went, in a sentence for each sequence: what it waited for, in how many steps its prompt was
        computed, how its tokens came, what stalled it. While it runs and after its end, as far as the manager's ring of
        StepRecords goes back."""
        pairs = zip(self.mailbox.requests, self.mailbox.streams, strict=True)
        return "\n".join(self._explain(request, stream.output) for request, stream in pairs)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the request is done, after at most `timeout` seconds."""
        if not self.done:
            self._check()
        return self.mailbox.wait(timeout)

    def cancel(self) -> None:
        """Ends the request within a step; its result then says "cancelled". Harmless once it has ended."""
        self._cancel()

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """The first sequence's result, waited for at most `timeout` seconds.

        Raises:
            TimeoutError: not done in time (the request goes on).
            Exception: the request's own error, if it ended with one.
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
            if not reader.has_news():
                self._check()
            self.mailbox.wait_for(reader.has_news)
            for delta in reader.read():
                yield delta
                self._raise_error_of(delta)
            if reader.at_end:
                return

    async def __aiter__(self) -> AsyncIterator[Delta]:
        reader = Reader(self)
        with _waking(self.mailbox) as event:
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
        with _waking(self.mailbox) as event:
            while not self.done:
                event.clear()
                if not self.done:
                    await event.wait()
        return self.result(timeout=0)

    def _repr_html_(self) -> str:
        if self.done:
            return side_by_side(map(result_card, self._finished()))
        return side_by_side(card(s.request_id, "", f"{len(s.token_ids)} tokens so far") for s in self.mailbox.streams)

    def _raise_error_of(self, delta: Delta) -> None:
        if delta.error is not None:
            output = next(s.output for s in self.mailbox.streams if s.request_id == delta.request_id)
            raise (output and output.exception) or RequestFailedError(delta.error)

    def _finished(self) -> list[GenerationOutput]:
        outputs = [s.output for s in self.mailbox.streams if s.output is not None]
        for output in outputs:
            if output.text is None and self.rendering is not None:
                output.text = self.rendering.text(output.prompt_ids, output.generated_tokens, output.stop_reason)
        return outputs


@contextmanager
def _waking(mailbox: Mailbox) -> Iterator[asyncio.Event]:
    """While open, every step's news set the event, on the event loop that runs now."""
    event = asyncio.Event()
    waker: Waker = (asyncio.get_running_loop(), event.set)
    mailbox.add_waker(waker)
    try:
        yield event
    finally:
        mailbox.remove_waker(waker)


class Reader:
    """One reader's place in a handle's streams, and their texts so far."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.mailbox = handle.mailbox
        self.places = [0] * handle.num_sequences
        self.ended = [False] * handle.num_sequences
        rendering, requests = handle.rendering, self.mailbox.requests
        self.texts = [rendering.reader(r.prompt_ids) if rendering is not None else None for r in requests]

    @property
    def at_end(self) -> bool:
        return all(self.ended)

    def has_news(self) -> bool:
        return any(
            len(s.token_ids) > place or (s.output is not None and not ended)
            for s, place, ended in zip(self.mailbox.streams, self.places, self.ended, strict=True)
        )

    def read(self) -> Iterator[Delta]:
        """What is new since the last call, at most one delta a sequence; a failed sequence's last one has its error."""
        for i, stream in enumerate(self.mailbox.streams):
            if self.ended[i]:
                continue
            output, new = stream.output, stream.token_ids[self.places[i] :]  # in this order: see Stream
            since, self.places[i] = self.places[i], self.places[i] + len(new)
            reader = self.texts[i]
            text = reader.push(new) if reader is not None else ""
            end: dict[str, Any] = {}
            if output is not None:
                self.ended[i] = True
                text += reader.end(output.stop_reason) if reader is not None else ""
                names = ("finish_reason", "error", "stop_reason")
                end = {name: getattr(output, name) for name in names}
            if output is not None or new:
                told = self._told(self.mailbox.requests[i], since, self.places[i])
                yield Delta(stream.request_id, self.mailbox.index, new, text, **told, **end)

    def _told(self, request: Request, since: int, upto: int) -> dict[str, Any]:
        """What is told of these tokens; a step's are there before it is delivered."""
        params = request.params
        return {
            "logprobs": request.logprobs[since:upto] if params.logprobs else None,
            "top_logprobs": request.top_logprobs[since:upto] if params.top_logprobs is not None else None,
        }
