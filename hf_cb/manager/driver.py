"""Rank 0 of a tensor-parallel model: it says what is to be done, and takes note of what became of it elsewhere."""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from hf_cb.errors import RankError, describe
from hf_cb.manager.team import Team, cut, logger, send

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
        self.dropped: deque[int] = deque()  # keys of runners that are gone: appended without a lock, by finalizers
        self._orders = dict(orders)
        self._news = dict(news)
        self._turn = threading.RLock()  # one section at a time
        self._sending = threading.Lock()
        self._section = 0
        self._inside = False
        self._grace = GRACE_S
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

    def answer(self, kind: str, call: int, what: str, value: Any) -> None:
        """Something for the same call on the other ranks: "item", "result" or "error"."""
        self._tell((kind, call, what, pickle.dumps(value)))

    def tell_ended(self, manager: int) -> None:
        """The manager of this number takes no steps any more."""
        self.ends[manager] += 1
        self._tell(("ended", manager))

    def _tell(self, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message)
        gone = None
        with self._sending:
            before = [("drop", self.dropped.popleft()) for _ in range(len(self.dropped))]
            for each in [*map(pickle.dumps, before), data]:
                for rank, connection in self._orders.items():
                    try:
                        connection.send_bytes(each)
                    except OSError:
                        gone = rank
        if gone is not None:
            self._break(f"Rank {gone} is gone.")

    def _wait_for_replies(self, number: int) -> list[Any]:
        def failure() -> Exception | None:
            return next((error for section, error, _ in self._failures.values() if section == number), None)

        def replied() -> bool:
            return all(self._replies.get(rank, (0,))[0] == number for rank in self._orders)

        with self._changed:
            self._changed.wait_for(lambda: self.broken or failure() is not None or replied())
            self.check()
            error = failure()
            if error is not None:
                raise error
            return [reply for _, reply in self._replies.values()]

    def _settle(self, number: int, error: BaseException) -> None:
        """This rank is out of a section by an error; the others may wait for it somewhere inside."""
        if self.broken is None:
            self._tell(("settle", number))
        with self._changed:
            self._changed.wait_for(lambda: self.broken or not self._unsettled(number), SETTLE_S)
            late = self._unsettled(number)
        if late:
            self._break(f"Rank 0 failed ({describe(error)}) while {_ranks(late)} went on.")
        if self.broken is not None:
            raise RankError(f"{self.broken} The processes have to be started again.") from error

    def _unsettled(self, number: int) -> list[int]:
        return [rank for rank, settled in self._settled.items() if settled < number]

    def _break(self, reason: str) -> None:
        if not self._note_broken(reason):
            return
        waiting = self._inside or bool(self._failures)
        level = logging.ERROR if waiting else logging.INFO  # somebody may just have finished
        logger.log(level, "%s Nothing more can be computed with models that are spread over these ranks.", reason)
        for connection in self._news.values():
            send(connection, ("broken", reason))
        cut(self.group, waiting)

    def _listen(self) -> None:
        """The thread that hears what the others have to say."""
        ranks = {id(connection): rank for rank, connection in self._news.items()}
        listening = list(self._news.values())
        while listening:
            overdue = min((until for _, _, until in self._failures.values()), default=None)
            ready = wait(listening, None if overdue is None else max(0.0, overdue - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks[id(connection)]
                try:
                    self._hear(rank, *connection.recv())
                except (EOFError, OSError):
                    listening.remove(connection)
                    self._break(f"Rank {rank} is gone.")
            if not ready:
                rank, (_, error, _) = next(iter(self._failures.items()))
                self._break(f"Rank {rank} failed ({describe(error)}) while the others went on.")
                self._failures.clear()

    def _hear(self, rank: int, kind: str, number: int, content: Any) -> None:
        with self._changed:
            if kind == "failed":
                self._failures[rank] = (number, content, time.monotonic() + self._grace)
            elif kind == "settled":
                self._settled[rank] = number
                self._failures.pop(rank, None)
            else:
                self._replies[rank] = (number, content)
            self._changed.notify_all()


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
