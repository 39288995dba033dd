"""Any other rank of a tensor-parallel model: it does what the driver says, in a thread of its own.

So a script may do the same on every rank: here a call waits until the driver's is over, and has its result. Whatever
the driver does between two calls of the script is followed too.
"""

from __future__ import annotations

import logging
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hf_cb.errors import HfCbError, RankError
from hf_cb.manager.team import Team, cut, logger, portable, send

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POLL_S = 0.1  # how often somebody who waits looks whether the driver is still there
LEAVE_S = 5.0  # at the end of the process, for what is being done


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
        """A call is over: what was borrowed for it goes back."""
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
        self._answers: dict[int, queue.SimpleQueue[tuple[str, str, bytes]]] = {}  # by call
        self._busy = False
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
        with self._changed:
            self._changed.wait_for(lambda: self.broken or len(self._models) > number)
            self.check()
            model = self._models[number]()
        if model is None:
            raise RankError(f"Rank {self.rank} has deleted a model that rank 0 uses.")
        return model

    def next_call(self) -> int:
        with self._changed:
            call = super().next_call()
            self._answers.setdefault(call, queue.SimpleQueue())
            return call

    def answers(self, call: int, what: str) -> Generator[Any, None, Any]:
        """The items of the driver's call, as they come; returns its result, or raises its error.

        Raises:
            RankError: the driver has made another call in this place, or is gone.
        """
        answers = self._answers[call]
        try:
            while True:
                kind, said, data = self._next(answers)
                if said != what:
                    raise RankError(
                        f"Rank {self.rank} calls {what} where rank 0 calls {said}: every rank has to make the same "
                        f"calls in the same order."
                    )
                try:
                    value = pickle.loads(data)
                except Exception as error:
                    raise RankError("What rank 0 answered cannot be read here.") from error
                if kind == "error":
                    raise value
                if kind == "result":
                    return value
                yield value
        finally:
            with self._changed:
                del self._answers[call]

    def wait_for_end(self, manager: int, times: int, timeout: float | None) -> None:
        """Until the manager of this number has stopped so many times, or nothing is left to wait for."""
        with self._changed:
            self._changed.wait_for(lambda: self.broken or self.ended.get(manager, 0) >= times, timeout)

    def _next(self, answers: queue.SimpleQueue[tuple[str, str, bytes]]) -> tuple[str, str, bytes]:
        while True:
            over = self.is_over
            try:
                return answers.get(timeout=POLL_S)
            except queue.Empty:
                if over:
                    raise RankError(f"{self.broken or 'Rank 0 is gone.'}") from None

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
                kind, *content = pickle.loads(self._orders.recv_bytes())
                if kind == "do":
                    self._do(*content)
                elif kind == "settle":
                    self._worker.settle()
                    send(self._news, ("settled", content[0], None))
                elif kind == "drop":
                    self._worker.drop(content[0])
                elif kind == "ended":
                    with self._changed:
                        self.ended[content[0]] = self.ended.get(content[0], 0) + 1
                        self._changed.notify_all()
                else:
                    self._hear(kind, *content)
        except (EOFError, OSError):
            self._note_broken("Rank 0 is gone.")
        except BaseException as error:
            logger.exception("Rank %d cannot follow rank 0 any more", self.rank)
            self._note_broken(f"Rank {self.rank} cannot follow rank 0 any more.")
            send(self._news, ("failed", 0, portable(error)))
        finally:
            self._worker.rest()

    def _do(self, number: int, order: tuple[Any, ...]) -> None:
        self._busy = True
        try:
            if self.broken is not None:
                return
            with torch.autocast("cpu", enabled=False):
                reply = self._worker.do(number, order)
        except Exception as error:
            if self.broken is None:
                refusal = isinstance(error, HfCbError)  # which the driver will have something to say about
                level = logging.INFO if refusal else logging.WARNING
                logger.log(level, "Rank %d: %s raised", self.rank, order[0], exc_info=True)
                error.add_note(f"(raised on rank {self.rank})")
                send(self._news, ("failed", number, portable(error)))
            return
        finally:
            self._busy = False
        if reply is not None:
            send(self._news, ("done", number, reply))

    def _hear(self, kind: str, call: int, what: str, data: bytes) -> None:
        """An answer for a call of this rank, which may be still to come, or over."""
        if kind != "item":
            self._worker.rest()
        with self._changed:
            if call > self._calls:
                self._answers.setdefault(call, queue.SimpleQueue())
            if call in self._answers:
                self._answers[call].put((kind, what, data))

    def _watch(self) -> None:
        """Waits for the one thing that cannot wait until an order is done."""
        try:
            reason = self._news.recv()[1]
        except (EOFError, OSError):
            reason = "Rank 0 is gone."
        if self._note_broken(reason) and self._busy:
            cut(self.group, waiting=True)
