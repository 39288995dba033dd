"""The public calls of a tensor-parallel model, which every rank makes: the driver's is the real one, and the others
wait for it and give its result, or raise its error. For any other model nothing happens here.

A call begins when all ranks have come to it (`agreement`), and leaves torch's global generator alike on all of them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hf_cb.core import GenerationOutput, Update
from hf_cb.errors import RankError, describe
from hf_cb.manager.agreement import Terms, random_digest, terms_of
from hf_cb.manager.driver import Driver
from hf_cb.manager.follower import Follower
from hf_cb.manager.meeting import team_of
from hf_cb.manager.team import RESTART, packed, portable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_cb.manager.manager import ContinuousBatchingManager

T = TypeVar("T")

_numbers: weakref.WeakKeyDictionary[ContinuousBatchingManager, int] = weakref.WeakKeyDictionary()


def shared(
    model: PreTrainedModel,
    what: str,
    call: Callable[[], T],
    send: Callable[[T], Any] | None = None,
    inputs: Any = None,
    options: Any = None,
) -> T:
    """The result of a call on every rank.

    Args:
        send: what the other ranks are told of it, if not itself.
        inputs, options: what it was called with, which has to be the same everywhere.
    """
    team = team_of(model)
    if team is None:
        return call()
    terms = _terms(team, model, what, inputs, options)
    if isinstance(team, Follower):
        return _result(team.follow(terms))
    with _telling(team, terms) as telling:
        result = call()
        telling.result = result if send is None else send(result)
    return result


def shared_stream(
    model: PreTrainedModel, what: str, call: Callable[[], Generator[T]], inputs: Any = None, options: Any = None
) -> Generator[T]:
    """The items of a call on every rank, as they come."""
    team = team_of(model)
    if team is None:
        return call()
    terms = _terms(team, model, what, inputs, options)
    if isinstance(team, Follower):
        return team.follow(terms)
    told = _told(team, terms, call)
    next(told)  # it has begun: if nobody ever wants its items, it notices when it goes
    return told


def _told(team: Driver, terms: Terms, call: Callable[[], Generator[T]]) -> Generator[T]:
    with _telling(team, terms) as telling, closing(call()) as source:
        yield None  # type: ignore[misc]
        for item in source:
            telling.item(item)
            yield item


def shared_manager(
    model: PreTrainedModel, what: str, call: Callable[[], ContinuousBatchingManager], options: Any = None
) -> ContinuousBatchingManager | FollowingManager:
    """The manager; on the other ranks one that follows it."""
    team = team_of(model)
    if team is None:
        return call()
    made: Any = shared(model, what, call, lambda manager: _introduce(team, manager), options=options)
    return FollowingManager(team, *made) if isinstance(team, Follower) else made


def shared_session(
    model: PreTrainedModel,
    what: str,
    call: Callable[[], AbstractContextManager[ContinuousBatchingManager]],
    options: Any = None,
) -> AbstractContextManager[ContinuousBatchingManager | FollowingManager]:
    """A running manager for a `with` block; the other ranks leave theirs when the driver has left its own."""
    team = team_of(model)
    if team is None:
        return call()
    make_terms = partial(_terms, team, model, what, None, options)
    return _follow(team, make_terms) if isinstance(team, Follower) else _lead(team, make_terms, call)


@contextmanager
def _lead(
    team: Driver, make_terms: Callable[[], Terms], call: Callable[[], AbstractContextManager[ContinuousBatchingManager]]
) -> Iterator[ContinuousBatchingManager]:
    with _telling(team, make_terms()) as telling, call() as manager:
        telling.item(_introduce(team, manager))
        yield manager


@contextmanager
def _follow(team: Follower, make_terms: Callable[[], Terms]) -> Iterator[FollowingManager]:
    answers = team.follow(make_terms())
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
        self._asked_to_stop = False

    def start(self) -> None:
        """The driver does, if it was not running."""
        if self._asked_to_stop or not self.is_running():
            self._ends += 1
            self._asked_to_stop = False

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
        self._asked_to_stop = True
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        self._team.wait_for_end(self._number, self._ends, timeout)

    def destroy(self) -> None:
        self.stop()

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

    def reset_prefix_cache(self) -> None:
        """The driver does: what prompts have in common is known there alone."""

    @property
    def background_thread_status(self) -> FollowerStatus:
        """Has `fatal_error`, as the driver's."""
        return FollowerStatus(RankError(f"{self._team.broken} {RESTART}") if self._team.broken else None)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RankError(
            f"Requests belong to rank 0, and this is rank {self._team.rank}: ask `if manager.is_tp_driver`, or call "
            f"model.generate_batch on every rank."
        )

    submit = stats = trace = _refuse

    def pause(self) -> AbstractContextManager[None]:
        """Not for several ranks."""
        return _no_pause()


@dataclass(frozen=True)
class FollowerStatus:
    fatal_error: Exception | None


# ------------------------------------------------------------------------------------------------------------- helpers


@dataclass
class _Telling:
    """What the same call on the other ranks hears of the driver's."""

    team: Driver
    number: int
    result: Any = None  # once it is over

    def item(self, value: Any) -> None:
        self.team.answer("item", self.number, _safe(value))


@contextmanager
def _telling(team: Driver, terms: Terms) -> Iterator[_Telling]:
    """A call of the driver's, begun when all ranks have come to it. Result or error reach the other ranks."""
    telling = _Telling(team, team.next_call())
    try:
        team.begin(telling.number, terms)
        yield telling
        team.answer("result", telling.number, _safe(telling.result), _moved(terms))
    except BaseException as error:
        left = not isinstance(error, Exception)  # an interrupt, or a generator that nobody wants any more
        said = RankError(f"Rank 0 has left {terms.what} ({describe(error)}).") if left else error
        team.answer("error", telling.number, packed(said), _moved(terms))
        raise


def _moved(terms: Terms) -> torch.Tensor | None:
    """The state of torch's global generator, if the call has moved it (seeds are drawn on rank 0 alone)."""
    return torch.get_rng_state() if random_digest() != terms.random else None


def _no_pause() -> AbstractContextManager[None]:
    raise RankError(
        "pause() is for models of one process: nobody would tell the other ranks when it begins and ends. Change the "
        "weights of a tensor-parallel model between calls, on every rank."
    )


def _terms(team: Driver | Follower, model: PreTrainedModel, what: str, inputs: Any, options: Any) -> Terms:
    return terms_of(model, f"{what} of {type(model).__name__} ({team.number_of(model)})", inputs, options)


def _introduce(team: Driver | Follower, manager: ContinuousBatchingManager) -> tuple[int, int]:
    """A manager's number, and how often it has stopped; from now on the other ranks hear when it does."""
    assert isinstance(team, Driver)
    number = _numbers.get(manager)
    if number is None:
        manager.pause = _no_pause  # type: ignore[method-assign]
        number = _numbers[manager] = team.next_manager()
        deliver = manager._deliver

        def told(updates: list[Update], error: BaseException | None) -> None:
            deliver(updates, error)
            if error is not None:  # the loop has ended
                team.tell_ended(number)

        manager._deliver = manager.loop._deliver = told  # type: ignore[method-assign]  # it may start again
    return number, team.ends[number]


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
