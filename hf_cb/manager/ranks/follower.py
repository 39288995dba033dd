"""Any other rank of a tensor-parallel model: it does what the driver says, in a thread of its own.

So a script may do the same on every rank: here a call waits until the driver's is over, and has its result. Whatever
the driver does between two calls of the script is followed too.
"""

from __future__ import annotations

import logging
import math
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hf_cb.errors import HfCbError, RankError
from hf_cb.manager.ranks import team
from hf_cb.manager.ranks.agreement import Terms
from hf_cb.manager.ranks.team import RESTART, Outbox, Team, cut, logger, packed, unpacked, wait_patiently

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POLL_S = 0.1  # how often somebody who waits looks whether the driver is still there
LEAVE_S = 5.0  # at the end of the process, for what is being done
REST_S = 1.0  # after so long without an order, what was borrowed goes back, if only for a while

Answer = tuple[str, bytes, Any]  # what it is, the pickled value, at the end perhaps a state of the random generator


class Worker(Protocol):
    """What a follower does when it is told."""

    def do(self, number: int, order: tuple[Any, ...]) -> Any:
        """An order; what it returns, if anything, is for the driver."""
        ...

    def drop(self, key: int) -> None:
        """The driver's runner of this key is gone."""
        ...

    def settle(self) -> None:
        """Returns when the device has done all that it was told."""
        ...

    def rest(self) -> None:
        """What was borrowed goes back."""
        ...


class Follower(Team):
    """Follows the driver until one of the two is gone.

    Args:
        orders, news: sockets to the driver.
        make_worker: called with this follower.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        orders: socket.socket,
        news: socket.socket,
        make_worker: Callable[[Follower], Worker],
    ) -> None:
        super().__init__(group, rank)
        self.ended: dict[int, int] = {}  # by manager: how often it has stopped
        self._sockets = (orders, news)
        self._orders, self._news = (Connection(s.dup().detach()) for s in self._sockets)
        self._outbox = Outbox({0: self._news})
        self._answers: dict[int, queue.SimpleQueue[Answer]] = {}  # by call
        self._busy = False
        # the section that failed here, as long as nobody knows what became of the others
        self._failed: int | None = None
        self._worker = make_worker(self)
        self._thread = threading.Thread(target=self._work, daemon=True, name="hf_cb follower")
        self._thread.start()
        threading.Thread(target=self._watch, daemon=True, name="hf_cb follower's ear").start()
        threading._register_atexit(self._leave)  # type: ignore[attr-defined]

    # -------------------------------------------------------------------------------------------------- by any thread

    @property
    def is_over(self) -> bool:
        """Whether the driver is gone."""
        return not self._thread.is_alive()

    def model(self, number: int) -> PreTrainedModel:
        """The model of this number, waited for if this rank's script has not come to it yet."""
        self._wait_for(lambda: self.broken or len(self._models) > number, team.LATE_S)
        with self._lock:
            self.check()
            model = self._models[number]() if len(self._models) > number else None
        if model is None:
            raise RankError(f"Rank {self.rank} does not have a model, or has it no more, that rank 0 uses.")
        return model

    def follow(self, terms: Terms) -> Generator[Any, None, Any]:
        """The items of the driver's call in this place, as they come; returns its result, or raises its error.

        Raises:
            RankError: the driver has made another call, or none within LATE_S, or is gone.
        """
        with self._lock:
            call = self.next_call()
            answers = self._answers.setdefault(call, queue.SimpleQueue())
        self._send("arrived", call, terms)
        return self._follow(call, terms, answers)

    def wait_for_end(self, manager: int, times: int, timeout: float | None) -> None:
        """Until the manager of this number has stopped so many times, or nothing is left to wait for."""
        self._wait_for(lambda: self.broken or self.ended.get(manager, 0) >= times, timeout)

    def _follow(self, call: int, terms: Terms, answers: queue.SimpleQueue[Answer]) -> Generator[Any, None, Any]:
        begun = same_random = False
        try:
            answer: Answer | None = self._first(answers, terms)
            while True:
                assert answer is not None
                kind, data, random = answer
                try:
                    value = pickle.loads(data)
                except Exception as error:
                    raise RankError("What rank 0 answered cannot be read here.") from error
                begun = True
                if kind == "begun":
                    same_random = value == terms.random
                elif kind == "item":
                    yield value
                else:
                    if random is not None and same_random:
                        torch.set_rng_state(random)
                    if kind == "error":
                        raise unpacked(value)
                    return value
                answer = self._next(answers)
        finally:
            if not begun:
                self._send("left", call, None)  # this rank may be anywhere when the driver comes to it
            with self._lock:
                self._answers.pop(call, None)

    def _first(self, answers: queue.SimpleQueue[Answer], terms: Terms) -> Answer:
        found: list[Answer] = []

        def has_come(timeout: float) -> bool:
            found.extend(answer for answer in [self._next(answers, timeout)] if answer is not None)
            return bool(found)

        if not wait_patiently(has_come, lambda: f"Rank {self.rank} waits for rank 0 to call {terms.what}."):
            raise RankError(f"Rank 0 did not call {terms.what}: every rank has to make the same calls.")
        return found[0]

    def _next(self, answers: queue.SimpleQueue[Answer], timeout: float = math.inf) -> Answer | None:
        """None after `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            over = self.is_over
            try:
                return answers.get(timeout=min(POLL_S, max(0.0, end - time.monotonic())))
            except queue.Empty:
                if over:
                    raise RankError(f"{self.broken or 'Rank 0 is gone.'} {RESTART}") from None
                if time.monotonic() >= end:
                    return None

    def _send(self, kind: str, number: int, content: Any) -> None:
        self._outbox.post(pickle.dumps((kind, number, content)))  # if the driver is gone, that is noticed elsewhere

    def _connections(self) -> Iterable[Any]:
        return [*self._sockets, self._orders, self._news]

    def _leave(self) -> None:
        """The process ends: the driver is told, and a thread in the middle of a forward is waited for."""
        for each in self._sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the driver has gone first
        self._thread.join(LEAVE_S)

    # ------------------------------------------------------------------------------------------------- by its threads

    def _work(self) -> None:
        try:
            while True:
                if not self._orders.poll(REST_S):
                    self._worker.rest()
                kind, *content = pickle.loads(self._orders.recv_bytes())
                if kind == "do":
                    self._do(*content)
                elif kind == "settle":
                    self._settle(content[0])
                elif kind == "drop":
                    self._worker.drop(content[0])
                elif kind == "ended":
                    with self._lock:
                        self.ended[content[0]] = self.ended.get(content[0], 0) + 1
                        self._bell.ring()
                else:
                    self._hear(kind, *content)
        except (EOFError, OSError):
            self._note_broken("Rank 0 is gone.")
        except BaseException as error:
            logger.exception("Rank %d cannot follow rank 0 any more", self.rank)
            self._note_broken(f"Rank {self.rank} cannot follow rank 0 any more.")
            self._send("failed", 0, packed(error))
        finally:
            self._worker.rest()

    def _do(self, number: int, order: tuple[Any, ...]) -> None:
        self._busy = True
        try:
            if self.broken is not None or self._failed is not None:
                return  # to take part in another collective than the rest would be worse
            with torch.autocast("cpu", enabled=False):
                reply = self._worker.do(number, order)
        except Exception as error:
            if self.broken is None:
                refusal = isinstance(error, HfCbError)  # which the driver will have something to say about
                level = logging.INFO if refusal else logging.WARNING
                logger.log(level, "Rank %d: %s raised", self.rank, order[0], exc_info=True)
                error.add_note(f"(raised on rank {self.rank})")
                self._failed = number
                self._send("failed", number, packed(error))
            return
        finally:
            self._busy = False
        if reply is not None:
            self._send("done", number, reply)

    def _settle(self, section: int) -> None:
        """The driver has failed in a section, and asks who has come to its end, well or not."""
        if self._failed in (None, section):  # an earlier one did not fail everywhere: then nothing is well
            self._worker.settle()
            self._failed = None
            self._send("settled", section, None)

    def _hear(self, kind: str, call: int, data: bytes, random: Any) -> None:
        """An answer for a call of this rank, which may be still to come, or over."""
        if kind in ("result", "error"):
            self._worker.rest()
        with self._lock:
            if call > self._calls:
                self._answers.setdefault(call, queue.SimpleQueue())
            if call in self._answers:
                self._answers[call].put((kind, data, random))

    def _watch(self) -> None:
        """Waits for the one thing that cannot wait until an order is done."""
        try:
            reason = self._news.recv()[1]
        except (EOFError, OSError):
            reason = "Rank 0 is gone."
        if self._note_broken(reason) and self._busy:
            cut(self.group, waiting=True)
