"""Policies that name what they may not: said by the policy's name, before anything is given to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from fake_runner import make_engine, request, run

from hf_cb.core import Request, Status
from hf_cb.errors import OptionError
from hf_cb.policies import Fair, Policy, Situation, make_policy


class Named(Policy):
    """Offers a share to somebody more."""

    name = "named"

    def __init__(self, more: Any) -> None:
        self.more = more

    def order(self, situation: Situation) -> Iterable[Request]:
        yield from super().order(situation)
        yield self.more


class Remembers(Policy):
    """Also those who have ended."""

    name = "remembers"

    def __init__(self) -> None:
        self.seen: dict[Request, None] = {}

    def order(self, situation: Situation) -> Iterable[Request]:
        self.seen |= dict.fromkeys(situation.waiting)
        return self.seen


class Takes(Policy):
    name = "takes"

    def victim(self, candidates: Sequence[Request]) -> Request:
        return None  # type: ignore[return-value]


class Swaps(Policy):
    name = "swaps"

    def gives_way(self, request: Request, running: Sequence[Request]) -> Request:
        return request


class Repeats(Policy):
    """Names one of the running twice, and others behind those who wait."""

    name = "repeats"

    def order(self, situation: Situation) -> Iterable[Request]:
        return [*situation.running[:1] * 2, *situation.waiting, *situation.running[1:]]


class Answers(Policy):
    """One of its methods returns what it may not."""

    name = "answers"

    def __init__(self, **answers: Any) -> None:
        for method, answer in answers.items():
            setattr(self, method, lambda *_, answer=answer: answer)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Answers(order=None), "order.*'answers' returned None.*iterable of requests"),
        (Answers(order=["a"]), "order.*'answers' names 'a'"),
        (Answers(order=[], wake_time="soon"), "wake_time.*'answers' returned 'soon'"),
        (Answers(rank=None), "rank.*'answers' does not put 'b' in a place .*NoneType"),
        (Named(request("ghost", [5])), "order.*'named' names 'ghost'"),
        (Named(None), "order.*'named' names None"),
        (Remembers(), "order.*'remembers' names 'a'"),
        (Takes(), "victim.*'takes' names None"),
        (Swaps(), "gives_way.*'swaps' names 'b'"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_it_is_told_by_its_name(policy: Policy, message: str) -> None:
    engine = make_engine(policy=policy, num_blocks=3, max_num_seqs=1 if policy.name == "swaps" else 2)
    with pytest.raises(RuntimeError, match=message):
        run(engine, [request("a", [1, 2], 9), request("b", [3, 4], 9)])


def test_a_running_request_of_another_manager_gets_no_blocks_here() -> None:
    other = make_engine()
    other.admit(theirs := request("theirs", [1, 2, 3]))
    other.step()
    assert theirs.status is Status.RUNNING
    engine = make_engine(policy=Named(theirs))
    with pytest.raises(RuntimeError, match="names 'theirs'"):
        run(engine, [request("a", [1, 2])])


def test_who_is_named_twice_takes_nobodys_turn() -> None:
    requests = [request(name, [i + 1], 9) for i, name in enumerate("abc")]
    steps = run(make_engine(policy=Repeats(), max_num_seqs=2), requests)
    assert [sorted(name for name, _ in step) for step in steps[:9]] == [["a", "b"]] * 9


def test_fair_keeps_counters_apart_though_another_manager_looks_in_between() -> None:
    """Without that each look would lift all users to the counter of the other manager's."""
    policy = Fair()
    one, two = (make_engine(policy=policy, max_num_seqs=1) for _ in range(2))
    policy.served = {"a": 50.0, "b": 0.0, "c": 90.0}
    for i in range(4):
        one.admit(request(f"A{i}", [i + 1], 1, user="a"))
        one.admit(request(f"B{i}", [i + 50], 1, user="b"))
        two.admit(request(f"C{i}", [i + 1], 1, user="c"))
    served = [u.request.request_id for u in one.step()]
    while one.has_work:
        two.step()
        served += [u.request.request_id for u in one.step()]
    assert served[:4] == ["B0", "B1", "B2", "B3"]


@pytest.mark.parametrize("text", ["fair:a=1:a=2", "fair:output_weight=1:output_weight=2", "static:4:batch_size=8"])
def test_nothing_is_given_twice(text: str) -> None:
    with pytest.raises(OptionError, match=text.rpartition(":")[2]):
        make_policy(text)
