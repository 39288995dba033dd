"""The public calls of a tensor-parallel model, which every rank makes: the driver's is the real one, and the others
wait for it and give its result, or raise its error. For any other model nothing happens here.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hf_cb.core import GenerationOutput, Update
from hf_cb.errors import RankError, describe
from hf_cb.manager.driver import Driver
from hf_cb.manager.follower import Follower
from hf_cb.manager.meeting import team_of
from hf_cb.manager.team import portable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_cb.manager.manager import ContinuousBatchingManager

T = TypeVar("T")

_numbers: weakref.WeakKeyDictionary[ContinuousBatchingManager, int] = weakref.WeakKeyDictionary()


def shared(model: PreTrainedModel, what: str, call: Callable[[], T], send: Callable[[T], Any] | None = None) -> T:
    """The result of a call on every rank. `send`: what the other ranks are told of it, if not itself."""
    team = team_of(model)
    if team is None:
        return call()
    number, what = team.next_call(), _named(team, model, what)
    if isinstance(team, Follower):
        return _result(team.answers(number, what))
    with _telling(team, number, what):
        result = call()
        team.answer("result", number, what, _safe(result if send is None else send(result)))
    return result


def shared_stream(model: PreTrainedModel, what: str, call: Callable[[], Generator[T]]) -> Generator[T]:
    """The items of a call on every rank, as they come."""
    team = team_of(model)
    if team is None:
        return call()
    number, what = team.next_call(), _named(team, model, what)
    if isinstance(team, Follower):
        return team.answers(number, what)
    with _telling(team, number, what):
        source = call()
    return _told(team, number, what, source)


def _told(team: Driver, number: int, what: str, source: Generator[T]) -> Generator[T]:
    with _telling(team, number, what):
        for item in source:
            team.answer("item", number, what, _safe(item))
            yield item
        team.answer("result", number, what, None)


def shared_manager(
    model: PreTrainedModel, what: str, call: Callable[[], ContinuousBatchingManager]
) -> ContinuousBatchingManager | FollowingManager:
    """The manager; on the other ranks one that follows it."""
    team = team_of(model)
    if team is None:
        return call()
    made: Any = shared(model, what, call, lambda manager: _introduce(team, manager))
    return FollowingManager(team, *made) if isinstance(team, Follower) else made


def shared_session(
    model: PreTrainedModel, what: str, call: Callable[[], AbstractContextManager[ContinuousBatchingManager]]
) -> AbstractContextManager[ContinuousBatchingManager | FollowingManager]:
    """A running manager for a `with` block; the other ranks leave theirs when the driver has left its own."""
    team = team_of(model)
    if team is None:
        return call()
    number, what = team.next_call(), _named(team, model, what)
    return _follow(team, number, what) if isinstance(team, Follower) else _lead(team, number, what, call)


@contextmanager
def _lead(
    team: Driver, number: int, what: str, call: Callable[[], AbstractContextManager[ContinuousBatchingManager]]
) -> Iterator[ContinuousBatchingManager]:
    with _telling(team, number, what):
        with call() as manager:
            team.answer("item", number, what, _introduce(team, manager))
            yield manager
        team.answer("result", number, what, None)


@contextmanager
def _follow(team: Follower, number: int, what: str) -> Iterator[FollowingManager]:
    answers = team.answers(number, what)
    manager = FollowingManager(team, *next(answers))
    manager.start()
    yield manager
    _result(answers)


# ----------------------------------------------------------------------------------------------------------- followers


class FollowingManager:
    """A manager on a rank that is not the driver: it takes no requests and has no results, and its thread is the
    driver's. Calls of transformers' own say so in transformers' words: None, or nothing."""

    is_tp_driver = False

    def __init__(self, team: Follower, number: int, ended: int) -> None:
        self._team = team
        self._number = number
        self._ends = ended  # how often the driver's will have stopped when this one has

    def start(self) -> None:
        """The driver does."""
        self._ends += 1

    def is_running(self) -> bool:
        return not self._team.is_over and self._team.ended.get(self._number, 0) < self._ends

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Waits, if it may, until the driver's manager has stopped."""
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        self._team.wait_for_end(self._number, self._ends, timeout)

    def destroy(self) -> None:
        self.join()

    def add_request(self, *_: Any, **__: Any) -> None:
        return None

    def add_requests(self, inputs: list[Any], *_: Any, **__: Any) -> list[None]:
        return [None for _ in inputs]

    def get_result(self, *_: Any, **__: Any) -> None:
        return None

    def __iter__(self) -> Iterator[GenerationOutput]:
        return iter(())

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        return iter(())

    def cancel_request(self, request_id: str) -> None:
        """The driver's requests are the driver's."""

    def register_result_handler(self, *_: Any) -> None:
        """There will be none."""

    def warmup(self) -> None:
        """Nothing is left to warm up."""

    @property
    def background_thread_status(self) -> FollowerStatus:
        """Has `fatal_error`, as the driver's."""
        return FollowerStatus(RankError(self._team.broken) if self._team.broken else None)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RankError(
            f"Requests belong to rank 0, and this is rank {self._team.rank}: ask `if manager.is_tp_driver`, or call "
            f"model.generate_batch on every rank."
        )

    submit = pause = stats = trace = reset_prefix_cache = _refuse


@dataclass(frozen=True)
class FollowerStatus:
    fatal_error: Exception | None


# ------------------------------------------------------------------------------------------------------------- helpers


@contextmanager
def _telling(team: Driver, number: int, what: str) -> Iterator[None]:
    """An exception inside reaches the same call on the other ranks."""
    try:
        yield
    except BaseException as error:
        left = not isinstance(error, Exception)  # an interrupt, or a generator that nobody wants any more
        said = RankError(f"Rank 0 has left {what} ({describe(error)}).") if left else portable(error)
        team.answer("error", number, what, said)
        raise


def _introduce(team: Driver | Follower, manager: ContinuousBatchingManager) -> tuple[int, int]:
    """A manager's number, and how often it has stopped; from now on the other ranks hear when it does."""
    assert isinstance(team, Driver)
    number = _numbers.get(manager)
    if number is None:
        number = _numbers[manager] = team.next_manager()
        deliver = manager._deliver

        def told(updates: list[Update], error: BaseException | None) -> None:
            deliver(updates, error)
            if error is not None:  # the loop has ended
                team.tell_ended(number)

        manager._deliver = manager.loop._deliver = told  # type: ignore[method-assign]  # it may start again
    return number, team.ends[number]


def _named(team: Driver | Follower, model: PreTrainedModel, what: str) -> str:
    return f"{what} of {type(model).__name__} ({team.number_of(model)})"


def _result(answers: Generator[Any, None, T]) -> T:
    while True:
        try:
            next(answers)
        except StopIteration as end:
            result: T = end.value
            return result


def _safe(value: Any) -> Any:
    """A result that can travel: errors in outputs as they can be read elsewhere."""
    if isinstance(value, dict):
        return {key: _safe(each) for key, each in value.items()}
    if isinstance(value, GenerationOutput) and value.exception is not None:
        value = copy.copy(value)
        value.exception = portable(value.exception)
    return value
