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

from hf_cb.core import GenerationOutput
from hf_cb.errors import RankError, describe
from hf_cb.manager.ranks.agreement import Terms, random_digest, terms_of
from hf_cb.manager.ranks.driver import Driver
from hf_cb.manager.ranks.follower import Follower
from hf_cb.manager.ranks.following_manager import FollowingManager, no_pause
from hf_cb.manager.ranks.meeting import team_of
from hf_cb.manager.ranks.team import packed, portable
from hf_cb.manager.running import after_stopping

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
    with _telling(team, model, terms) as telling:
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
    told = _told(team, model, terms, call)
    next(told)  # it has begun: if nobody ever wants its items, it notices when it goes
    return told


def _told(team: Driver, model: PreTrainedModel, terms: Terms, call: Callable[[], Generator[T]]) -> Generator[T]:
    with _telling(team, model, terms) as telling, closing(call()) as source:
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
    return _follow(team, make_terms) if isinstance(team, Follower) else _lead(team, model, make_terms, call)


@contextmanager
def _lead(
    team: Driver,
    model: PreTrainedModel,
    make_terms: Callable[[], Terms],
    call: Callable[[], AbstractContextManager[ContinuousBatchingManager]],
) -> Iterator[ContinuousBatchingManager]:
    with _telling(team, model, make_terms()) as telling, call() as manager:
        telling.item(_introduce(team, manager))
        yield manager


@contextmanager
def _follow(team: Follower, make_terms: Callable[[], Terms]) -> Iterator[FollowingManager]:
    answers = team.follow(make_terms())
    manager = FollowingManager(team, *next(answers))
    manager.start()
    yield manager
    _result(answers)


@dataclass
class _Telling:
    """What the same call on the other ranks hears of the driver's."""

    team: Driver
    number: int
    result: Any = None  # once it is over

    def item(self, value: Any) -> None:
        self.team.answer("item", self.number, _safe(value))


@contextmanager
def _telling(team: Driver, model: PreTrainedModel, terms: Terms) -> Iterator[_Telling]:
    """A call of the driver's, begun when all ranks have come to it. Result or error reach the other ranks: after the
    last step of a call that has been left, since they will use their processes' group for something else then."""
    telling = _Telling(team, team.next_call())
    try:
        team.begin(telling.number, terms)
        yield telling
        team.answer("result", telling.number, _safe(telling.result), _moved(terms))
    except BaseException as error:
        left = not isinstance(error, Exception)  # an interrupt, or a generator that nobody wants any more
        said = RankError(f"Rank 0 has left {terms.what} ({describe(error)}).") if left else error
        after_stopping(model, partial(team.answer, "error", telling.number, packed(said), _moved(terms)))
        raise


def _moved(terms: Terms) -> torch.Tensor | None:
    """The state of torch's global generator, if the call has moved it (seeds are drawn on rank 0 alone)."""
    return torch.get_rng_state() if random_digest() != terms.random else None


def _terms(team: Driver | Follower, model: PreTrainedModel, what: str, inputs: Any, options: Any) -> Terms:
    return terms_of(model, f"{what} of {type(model).__name__} ({team.number_of(model)})", inputs, options)


def _introduce(team: Driver | Follower, manager: ContinuousBatchingManager) -> tuple[int, int]:
    """A manager's number, and how often it has stopped; from now on the other ranks hear when it does."""
    assert isinstance(team, Driver)
    number = _numbers.get(manager)
    if number is None:
        number = _numbers[manager] = team.next_manager()
        manager.on_end = partial(team.tell_ended, number)
        manager.pause = no_pause  # type: ignore[method-assign]
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
