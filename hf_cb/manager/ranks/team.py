"""The processes (ranks) of a tensor-parallel model, as each of them sees the others.

Rank 0 is the driver; the others follow. Two connections lead from the driver to each of them: over the one it says
what is to be done, in order, and over the other either side says what has gone wrong. A rank that waits for the others
inside a collective can be told nothing; so when one of them cannot go on, all cut the model's process group, and every
collective that waits ends with an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from hf_cb.errors import RankError, describe
from hf_cb.manager.bell import Bell

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from transformers import PreTrainedModel

logger = logging.getLogger("hf_cb")

CUT_TAG = 0x6862  # of a message that nobody sends
RESTART = "The processes have to be started again."
NOTICE_S = 10.0  # who waits for other ranks for so long says so
LATE_S = 1800.0  # and gives up after so long, as PyTorch's collectives do

_teams: weakref.WeakSet[Team] = weakref.WeakSet()


class Team:
    """What driver and followers have in common.

    Args:
        group: the model's process group; all models of the same group share a team.
        rank: this process's, in the group.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = distributed.get_world_size(group)
        self.pid = os.getpid()
        self.broken: str | None = None  # why nothing can go on
        self._lock = threading.RLock()
        self._bell = Bell()  # rung after whatever somebody may wait for
        self._models: list[weakref.ref[PreTrainedModel]] = []
        self._calls = 0
        _teams.add(self)

    def number_of(self, model: PreTrainedModel) -> int:
        """The model's number, the same on every rank: they come in the same order everywhere."""
        with self._lock:
            for number, known in enumerate(self._models):
                if known() is model:
                    return number
            self._models.append(weakref.ref(model))
            self._bell.ring()
            return len(self._models) - 1

    def next_call(self) -> int:
        """The number of a public call, the same on every rank."""
        with self._lock:
            self._calls += 1
            return self._calls

    def _wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        """Waits until `predicate`, under the lock, is true, for at most `timeout` seconds; what it says then."""

        def is_so() -> bool:
            with self._lock:
                return bool(predicate())

        return self._bell.wait_for(is_so, timeout)

    def check(self) -> None:
        """Raises RankError if nothing can go on."""
        if self.broken is not None:
            raise RankError(f"{self.broken} {RESTART}")

    def _connections(self) -> Iterable[Any]:
        """All that lead to other ranks, to be closed."""
        raise NotImplementedError

    def _note_broken(self, reason: str) -> bool:
        """Whether this is news."""
        with self._lock:
            if self.broken is not None:
                return False
            self.broken = reason
            self._bell.ring()
            return True


def _close_all() -> None:
    """In a forked process: as long as that had them open, nobody would notice that the rank itself is gone."""
    for team in list(_teams):
        for connection in team._connections():
            connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


class Outbox:
    """Messages to other ranks, sent in their order by whichever thread is there.

    A garbage collection may post one in the middle of another's sending, in the same thread: so nobody waits for who is
    sending, and who is sends what the others have left.
    """

    def __init__(self, connections: Mapping[int, Connection]) -> None:
        self.connections = dict(connections)
        self._pid = os.getpid()
        self._left: deque[bytes] = deque()
        self._lock = threading.Lock()

    def post(self, data: bytes) -> list[int]:
        """The ranks that have turned out to be gone. If it raises, it was interrupted, and perhaps half of a message is
        sent. A forked process sends nothing."""
        self._left.append(data)
        gone = []
        while self._left and not self._lock.locked() and os.getpid() == self._pid:
            with self._lock:  # entered like this, an interrupt cannot leave it locked
                while self._left:
                    data = self._left.popleft()
                    gone += [rank for rank, each in self.connections.items() if not _sent(each, data)]
        return gone


def _sent(connection: Connection, data: bytes) -> bool:
    """Whether there was somebody to send it to."""
    try:
        connection.send_bytes(data)
    except OSError:
        return False
    return True


def wait_patiently(condition: Callable[[float], bool], describe_wait: Callable[[], str]) -> bool:
    """Whether `condition`, which waits for at most so many seconds, becomes true within LATE_S; says so if that takes
    long."""
    if condition(min(NOTICE_S, LATE_S)):
        return True
    if LATE_S > NOTICE_S:
        logger.warning("%s It gives up after %g s.", describe_wait(), LATE_S)
    return condition(max(0.0, LATE_S - NOTICE_S))


def cut(group: Any, waiting: bool) -> None:
    """Ends every collective of a process group that waits now, on this rank and on those that it is connected with.

    `waiting`: a thread here may be inside of one; else at most the device is.
    """
    with contextlib.suppress(Exception):  # the group may be gone already
        given = str(distributed.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
        backends = {part.rpartition(":")[2] for part in given.split(",")}
        if backends - {"gloo"}:
            group.abort()
        if "gloo" in backends and waiting:
            # its abort does nothing, but it closes a connection on which something has timed out
            me = distributed.get_rank()
            for peer in set(distributed.get_process_group_ranks(group)) - {me}:
                work = distributed.irecv(torch.empty(1), src=peer, group=group, tag=CUT_TAG)
                with contextlib.suppress(Exception):
                    work.wait(timedelta(milliseconds=1))


def portable(error: BaseException) -> Exception:
    """The error itself if it can travel to another process, else one that says the same."""
    try:
        if isinstance(error, Exception) and type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # its class wants more arguments, or holds a lock
        pass
    return RankError(describe(error))


def packed(error: BaseException) -> tuple[str, bytes]:
    """An error as it travels to another process."""
    return describe(error), pickle.dumps(portable(error))


def unpacked(travelled: tuple[str, bytes]) -> Exception:
    """The error, or, where what it is made of cannot be found here, one that says the same."""
    said, data = travelled
    try:
        error = pickle.loads(data)
    except Exception:
        return RankError(said)
    return error if isinstance(error, Exception) else RankError(said)


def ranks(numbers: Sequence[int]) -> str:
    """In words."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
