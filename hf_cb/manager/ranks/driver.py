"""Rank 0 of a tensor-parallel model: it says what is to be done, and takes note of what became of it elsewhere."""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from hf_cb.errors import RankError, describe
from hf_cb.manager.ranks.agreement import Terms
from hf_cb.manager.ranks.team import RESTART, Outbox, Team, cut, logger, ranks, unpacked, wait_patiently

GRACE_S = 2.0  # after a rank has failed: it may have happened on all of them, and then nothing is lost
SETTLE_S = 5.0  # after this rank has failed: for the others to come to an end with what they were told


@dataclass(frozen=True)
class Section:
    """Something that all ranks do at once; `replies` waits for what the others made of it, and raises what one of
    them raised."""

    number: int
    replies: Callable[[], list[Any]]


class Driver(Team):
    """Keeps all ranks doing the same things in the same order.

    Args:
        orders, news: the two connections to each of the other ranks.
    """

    def __init__(self, group: Any, orders: Mapping[int, Connection], news: Mapping[int, Connection]) -> None:
        super().__init__(group, 0)
        self.ends: Counter[int] = Counter()  # by manager: how often it has stopped
        self._managers = itertools.count()
        self._orders = Outbox(orders)
        self._news = Outbox(news)
        self._turn = threading.RLock()  # one section at a time
        self._section = 0
        self._inside = False
        self._grace = GRACE_S
        # by rank and call; None: it came and has not waited
        self._arrived: dict[int, dict[int, Terms | None]] = {rank: {} for rank in orders}
        self._settled = dict.fromkeys(orders, 0)  # by rank: the section up to which it owes nothing
        self._replies: dict[int, tuple[int, Any]] = {}  # by rank: the newest one, and its section
        self._failures: dict[int, tuple[int, Exception, float]] = {}  # by rank: section, error, and until when it waits
        threading.Thread(target=self._listen, daemon=True, name="hf_cb driver").start()

    @contextmanager
    def section(self, order: tuple[Any, ...], grace: float = GRACE_S) -> Iterator[Section]:
        """Inside, this rank and all others do the same.

        If the block raises, the others are waited for; if they come to an end too, the error is an ordinary one.

        Args:
            grace: seconds for which this rank may stay inside after another has failed.

        Raises:
            RankError: a rank is gone, or waits for something that will not happen: nothing can go on.
        """
        with self._turn:
            self._section += 1
            number, self._grace, self._inside = self._section, grace, True
            try:
                self.check()
                self._tell(("do", number, order))
                self.check()
                yield Section(number, partial(self._wait_for_replies, number))
            except BaseException as error:
                self._settle(number, error)
                raise
            finally:
                self._inside = False

    def next_manager(self) -> int:
        """A number for a manager."""
        return next(self._managers)

    def begin(self, call: int, terms: Terms) -> None:
        """Waits until all ranks have come to a public call, so that none of them is still changing the weights.

        Raises:
            RankError: they have come to different ones, or do not come within LATE_S.
        """

        def late() -> list[int]:
            return [rank for rank, calls in self._arrived.items() if call not in calls]

        def all_here(timeout: float) -> bool:
            return self._wait_for(lambda: self.broken or not late(), timeout)

        if not wait_patiently(all_here, lambda: f"Rank 0 waits for {ranks(late())} to call {terms.what}."):
            raise RankError(
                f"{ranks(late()).capitalize()} did not call {terms.what}: every rank has to make the same calls."
            )
        self.check()
        found = {rank: calls.pop(call) for rank, calls in self._arrived.items()}
        for rank, other in found.items():
            conflict = terms.conflict(rank, other) if other else f"Rank {rank} has not waited with {terms.what}."
            if conflict is not None:
                raise RankError(conflict)
        self.answer("begun", call, terms.random)

    def answer(self, kind: str, call: int, value: Any, random: Any = None) -> None:
        """Something for the same call on the other ranks: "item", "result" or "error". `random`: the state of torch's
        global generator at the end of a call that has moved it."""
        self._tell((kind, call, pickle.dumps(value), random))

    def tell_ended(self, manager: int) -> None:
        """The manager of this number takes no steps any more."""
        self.ends[manager] += 1
        self._tell(("ended", manager))

    def drop(self, key: int) -> None:
        """The runner of this key is gone; called by a finalizer, anywhere."""
        self._orders.post(pickle.dumps(("drop", key)))

    def _connections(self) -> Iterable[Any]:
        return [*self._orders.connections.values(), *self._news.connections.values()]

    def _tell(self, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message)
        try:
            gone = self._orders.post(data)
        except BaseException:  # half of it may be sent
            self._break("Rank 0 was interrupted while it spoke to the others.")
            raise
        if gone:
            self._break(f"Rank {gone[0]} is gone.")

    def _wait_for_replies(self, number: int) -> list[Any]:
        def failure() -> Exception | None:
            return next((error for section, error, _ in self._failures.values() if section == number), None)

        def replied() -> bool:
            return all(self._replies.get(rank, (0,))[0] == number for rank in self._settled)

        self._wait_for(lambda: self.broken or failure() is not None or replied())
        with self._lock:
            self.check()
            error = failure()
            if error is not None:
                raise error
            return [reply for _, reply in self._replies.values()]

    def _settle(self, number: int, error: BaseException) -> None:
        """This rank is out of a section by an error; the others may wait for it somewhere inside."""
        try:
            if self.broken is None:
                self._tell(("settle", number))
            self._wait_for(lambda: self.broken or not self._unsettled(number), SETTLE_S)
            late = self._unsettled(number)
        except BaseException:  # an interrupt: nobody knows where the others are
            self._break(f"Rank 0 was interrupted after it had failed ({describe(error)}).")
            raise
        if late:
            self._break(f"Rank 0 failed ({describe(error)}) while {ranks(late)} went on.")
        if self.broken is not None and isinstance(error, Exception):  # an interrupt stays one
            raise RankError(f"{self.broken} {RESTART}") from error

    def _unsettled(self, number: int) -> list[int]:
        return [rank for rank, settled in self._settled.items() if settled < number]

    def _break(self, reason: str) -> None:
        if not self._note_broken(reason):
            return
        waiting = self._inside or bool(self._failures)
        level = logging.ERROR if waiting else logging.INFO  # somebody may just have finished
        logger.log(level, "%s Nothing more can be computed with models that are spread over these ranks.", reason)
        self._news.post(pickle.dumps(("broken", reason)))
        cut(self.group, waiting)

    def _listen(self) -> None:
        """The thread that hears what the others have to say."""
        try:
            self._hear_all({connection: rank for rank, connection in self._news.connections.items()})
        except BaseException as error:
            self._break(f"Rank 0 cannot hear the others any more ({describe(error)}).")
            raise

    def _hear_all(self, listening: dict[Any, int]) -> None:
        while listening:
            overdue = min((until for _, _, until in self._failures.values()), default=None)
            ready = wait(listening, None if overdue is None else max(0.0, overdue - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    self._hear(listening[connection], *connection.recv())
                except (EOFError, OSError):
                    self._break(f"Rank {listening.pop(connection)} is gone.")
            if not ready:
                rank, (_, error, _) = next(iter(self._failures.items()))
                self._break(f"Rank {rank} failed ({describe(error)}) while the others went on.")
                self._failures.clear()

    def _hear(self, rank: int, kind: str, number: int, content: Any) -> None:
        with self._lock:
            if kind in ("arrived", "left"):
                self._arrived[rank][number] = content
            elif kind == "failed":
                self._failures[rank] = (number, unpacked(content), time.monotonic() + self._grace)
            elif kind == "settled":
                self._settled[rank] = number
                self._failures.pop(rank, None)
            else:
                self._replies[rank] = (number, content)
            self._bell.ring()
