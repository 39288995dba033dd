"""Where a step's news go: to a mailbox, or for transformers' own calls to a callback or the shared output queue."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from hf_cb.core import GenerationOutput, Request, Update
from hf_cb.manager.bell import Bell
from hf_cb.manager.mailbox import Mailbox, make_output


class OutputQueue:
    """Results of `add_request`, for `get_result` and iteration: one may be asked for by id, without touching others."""

    def __init__(self) -> None:
        self._outputs: deque[GenerationOutput] = deque()
        self._lock = threading.RLock()
        self._bell = Bell()
        self._closed = False

    def put(self, output: GenerationOutput) -> None:
        with self._lock:
            self._outputs.append(output)
        self._bell.ring()

    def get(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The oldest output (of that request); None after `timeout` seconds or once nothing more can come."""
        found: list[GenerationOutput] = []

        def take() -> bool:
            with self._lock:
                output = next((o for o in self._outputs if request_id in (None, o.request_id)), None)
                if output is not None:
                    self._outputs.remove(output)
                    found.append(output)
                return output is not None or self._closed

        self._bell.wait_for(take, timeout)
        return found[0] if found else None

    def take_all(self, request_id: str) -> list[GenerationOutput]:
        """Removes and returns what is there of one request, oldest first."""
        with self._lock:
            found = [o for o in self._outputs if o.request_id == request_id]
            self._outputs = deque(o for o in self._outputs if o.request_id != request_id)
            return found

    def close(self) -> None:
        """No more outputs will come: waiting readers return."""
        with self._lock:
            self._closed = True
        self._bell.ring()

    def reopen(self) -> None:
        with self._lock:
            self._closed = False


class Router:
    """Knows for each live request who wants its news. `deliver` is called by the engine's thread."""

    def __init__(self) -> None:
        self.queue = OutputQueue()
        self._mailboxes: dict[Request, Mailbox] = {}
        self._streaming: dict[Request, bool] = {}  # requests of transformers' own calls
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]] = {}
        self._lock = threading.Lock()

    def attach(self, request: Request, mailbox: Mailbox | None, streaming: bool = False) -> None:
        """Before the request runs: its news go to the mailbox, or, without one, the way of transformers' calls."""
        with self._lock:
            if mailbox is not None:
                self._mailboxes[request] = mailbox
            else:
                self._streaming[request] = streaming

    def detach(self, request: Request) -> None:
        with self._lock:
            self._mailboxes.pop(request, None)
            self._streaming.pop(request, None)

    def live(self) -> list[Request]:
        with self._lock:
            return [*self._mailboxes, *self._streaming]

    def register(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Outputs of that request go to the callback, on this event loop; what came before is handed over first."""
        loop = asyncio.get_running_loop()
        with self._lock:
            early = self.queue.take_all(request_id)
            if not any(output.is_finished() for output in early):
                self._handlers[request_id] = (callback, loop)
            for output in early:
                loop.call_soon_threadsafe(callback, output)

    def unregister(self, request_id: str) -> None:
        """No output of that request will come."""
        with self._lock:
            self._handlers.pop(request_id, None)

    def refuse(self, output: GenerationOutput) -> bool:
        """Hands a request's only output to its registered callback, if it has one."""
        with self._lock:
            entry = self._handlers.pop(output.request_id, None)
        if entry is not None:
            callback, loop = entry
            _call_soon(loop, [lambda: callback(output)])
        return entry is not None

    def deliver(self, updates: list[Update], error: BaseException | None = None) -> None:
        """Hands out a step's news; one wake for each event loop that waits."""
        wakes: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        with self._lock:
            wanted = [(u, self._mailboxes.get(u.request), self._streaming.get(u.request)) for u in updates]
        for update, mailbox, streaming in wanted:
            request, finished = update.request, update.finished or error is not None
            if finished:
                self.detach(request)
            if mailbox is not None:
                output = make_output(request, error) if finished else None
                for loop, call in mailbox.push(request, update.new_ids, output):
                    if loop is None:
                        call()
                    else:
                        wakes.setdefault(loop, []).append(call)
            elif streaming is not None and (finished or (streaming and update.new_ids)):
                self._deliver_output(make_output(request, error), wakes)
        for loop, calls in wakes.items():
            _call_soon(loop, calls)

    def _deliver_output(
        self, output: GenerationOutput, wakes: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]]
    ) -> None:
        with self._lock:  # together with `register`, so that no output falls between the queue and the callback
            entry = self._handlers.get(output.request_id)
            if entry is None:
                self.queue.put(output)
                return
            if output.is_finished():
                del self._handlers[output.request_id]
        callback, loop = entry
        wakes.setdefault(loop, []).append(lambda: callback(output))


def _call_soon(loop: asyncio.AbstractEventLoop, calls: list[Callable[[], None]]) -> None:
    def run_all() -> None:
        for call in calls:
            try:
                call()
            except BaseException as error:  # one reader's callback: the others' news still come
                context = {"message": "hf_cb: a result handler raised", "exception": error}
                loop.call_exception_handler(context)

    try:
        loop.call_soon_threadsafe(run_all)
    except RuntimeError:  # the reader's loop is closed: nobody is there to be told
        return
