"""What a follower does and does not do, without other processes: the test is its driver."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from hf_cb.errors import RankError
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.manager.ranks.follower import Follower
from hf_cb.manager.ranks.following_manager import FollowingManager


class Worker:
    """Notes what it is told to do, and fails when it is told so."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def do(self, number: int, order: tuple[Any, ...]) -> Any:
        self.done.append(number)
        if order == ("fail",):
            raise ValueError("as it was told")
        return "reply"

    def drop(self, key: int) -> None:
        self.done.append(f"dropped {key}")

    def settle(self) -> None: ...

    def rest(self) -> None: ...


class Driver:
    """The other end of the two connections."""

    def __init__(self, worker: Worker) -> None:
        (orders, theirs), (news, their_news) = socket.socketpair(), socket.socketpair()
        self.orders, self.news = Connection(orders.detach()), Connection(news.detach())
        self.worker = worker
        self.follower = Follower(None, 1, theirs, their_news, lambda _: worker)

    def tell(self, *message: Any) -> None:
        self.orders.send_bytes(pickle.dumps(message))

    def hear(self) -> tuple[str, int]:
        assert self.news.poll(10)
        kind, number, _ = self.news.recv()
        return kind, number


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 2)
    driver = Driver(Worker())
    yield driver
    driver.orders.close()
    driver.news.close()


def test_who_has_failed_does_nothing_until_the_driver_has_failed_too(driver: Driver) -> None:
    driver.tell("do", 1, ("fail",))
    assert driver.hear() == ("failed", 1)
    driver.tell("do", 2, ("work",))  # with others it would be in another collective than they
    driver.tell("settle", 1)
    assert driver.hear() == ("settled", 1)
    driver.tell("do", 3, ("work",))
    assert driver.hear() == ("done", 3)
    assert driver.worker.done == [1, 3]


def test_a_later_failure_of_the_drivers_does_not_settle_an_earlier_one(driver: Driver) -> None:
    driver.tell("do", 1, ("fail",))
    assert driver.hear() == ("failed", 1)
    driver.tell("settle", 2)  # the driver was well in 1
    driver.tell("do", 3, ("work",))
    driver.tell("drop", 7)
    driver.tell("settle", 1)
    assert driver.hear() == ("settled", 1)
    assert driver.worker.done == [1, "dropped 7"]


def test_its_manager_has_all_that_the_drivers_has_or_refuses_it() -> None:
    internal = {"recipe", "submit_ids", "recorder"}
    public = {name for name in dir(ContinuousBatchingManager) if name[0] != "_"} - internal
    assert public <= set(dir(FollowingManager)), public - set(dir(FollowingManager))
    manager = FollowingManager(SimpleNamespace(rank=1), 0, 0)
    for call in (manager.submit, manager.stats, manager.trace, manager.display, manager.record):
        with pytest.raises(RankError, match="this is rank 1"):
            call()
