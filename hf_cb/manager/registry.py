"""Which requests of a manager are alive, and whether one more may come."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from hf_cb.core import Request, Status, Update
from hf_cb.errors import OptionError, QueueFullError
from hf_cb.values import is_number

POLL_S = 0.02  # how often a submission that waits looks whether there is room


class Registry:
    """Live requests by id, under one lock; and totals.

    Args:
        limit: waiting requests beyond which a submission is rejected; 0 for none.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.finished = 0
        self.tokens = 0
        self._live: dict[str, Request] = {}
        self._cancelling: set[Request] = set()
        self._ids = itertools.count()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> Request | None:
        return self._live.get(request_id)

    def known(self, requests: Iterable[Request]) -> list[Request]:
        """Those of them that were accepted and have not ended; waits for whoever is just submitting them."""
        with self._lock:
            return [r for r in requests if self._live.get(r.request_id) is r]

    def next_id(self) -> str:
        """A request id that no live request has."""
        return next(name for i in self._ids if (name := f"req_{i}") not in self._live)

    @contextmanager
    def entering(
        self, requests: Sequence[Request], bounded: bool, wait: float, check: Callable[[], None]
    ) -> Iterator[None]:
        """Inside, the requests are alive and nobody's cancellation can overtake them; an exception takes them out.

        Args:
            check: raises where there would never be room.

        Raises:
            QueueFullError: no room for them within `wait` seconds, with the numbers.
            OptionError: their id is in use, or so many can never wait at once.
        """
        began = time.monotonic()
        while True:
            with self._lock:
                if not bounded or not self.limit or self._has_room(len(requests), wait, began):
                    try:
                        self._enter(requests)
                        yield
                    except BaseException:
                        for request in self.known(requests):
                            del self._live[request.request_id]
                        raise
                    return
            check()
            time.sleep(POLL_S)

    def _enter(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._live:
                raise OptionError(f"request_id={request.request_id!r} is in use by a live request: choose another.")
        self._live.update((r.request_id, r) for r in requests)

    def _has_room(self, count: int, wait: float, began: float) -> bool:
        """Whether so many may enter; QueueFullError if not, and they have waited long enough."""
        if count > self.limit:
            raise OptionError(f"num_return_sequences={count} can never be queued with max_queue_size={self.limit}.")
        if not is_number(wait) or not wait >= 0:
            raise OptionError(f"queue_wait must be a number of seconds, not {wait!r}.")
        queued = self._queued()
        if queued + count > self.limit and time.monotonic() - began >= wait:
            waited = f" after {wait:g} s" if wait else ""
            raise QueueFullError(
                f"{queued} requests wait{waited} and max_queue_size={self.limit}: try again later, or let submit "
                f"wait longer (queue_wait)."
            )
        return queued + count <= self.limit

    def _queued(self) -> int:
        """Requests that have not started; those that gave way to others have."""
        return sum(r.started is None and r.status is Status.WAITING for r in self._live.values())

    def leave(self, updates: Iterable[Update], everybody: bool = False) -> None:
        """Counts a step's tokens, and forgets the requests that have ended (`everybody`: all of them have)."""
        with self._lock:
            for update in updates:
                self.tokens += len(update.new_ids)
                if update.finished or everybody:
                    self.finished += 1
                    self._live.pop(update.request.request_id, None)
                    self._cancelling.discard(update.request)

    @contextmanager
    def cancelling(self, requests: Sequence[Request]) -> Iterator[bool]:
        """Whether somebody has yet to be told to cancel them; inside, none of them can enter or leave."""
        if self._cancelling.issuperset(requests):  # so that asking again and again keeps nobody busy
            yield False
            return
        with self._lock:
            self._cancelling.update(self.known(requests))
            yield True
