"""A step that raises is repeated in parts: the request to blame ends with its error, the others with their answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_runner import FakeRunner, resolved

from hf_cb.core import Request, SamplingParams, Update
from hf_cb.engine.engine import Engine
from hf_cb.errors import ModelChangedError
from hf_cb.steps import StepBatch


class FaultyRunner(FakeRunner):
    """Raises where `fault` says so, after everything was computed: a half-done step would show."""

    def __init__(self, fault: Callable[[StepBatch], None]) -> None:
        super().__init__()
        self.fault = fault
        self.forgotten: list[str] = []

    def forward(self, batch: StepBatch) -> torch.Tensor:
        logits = super().forward(batch)
        self.fault(batch)
        return logits

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)


def make_engine(fault: Callable[[StepBatch], None], **options) -> Engine:
    return Engine(FaultyRunner(fault), resolved(**options))


def run(engine: Engine, requests: list[Request]) -> dict[str, Update]:
    """The last update of each request."""
    for request in requests:
        engine.admit(request)
    last = {}
    steps = 0
    while engine.has_work:
        for update in engine.step():
            if update.finished:
                assert update.request.request_id not in last, "a request ends once"
                last[update.request.request_id] = update
        steps += 1
        assert steps < 2000, "no progress"
    engine.check_idle()
    return last


def make_requests(count: int, prompt: int = 6, new_tokens: int = 5) -> list[Request]:
    return [Request(f"r{i}", [100 * i + j for j in range(prompt)], SamplingParams(new_tokens)) for i in range(count)]


def poison(*names: str, at: int = 0) -> Callable[[StepBatch], None]:
    """A forward that cannot compute these requests once they have generated `at` tokens."""

    def fault(batch: StepBatch) -> None:
        for request in batch.requests:
            if request.request_id in names and request.num_output >= at:
                raise ValueError(f"poison in {request.request_id}")

    return fault


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("names", [("r0",), ("r4",), ("r2", "r5"), ("r0", "r1", "r2")])
@pytest.mark.parametrize("budget", [4, 64])
def test_the_culprits_end_and_the_others_go_on(names: tuple[str, ...], at: int, budget: int) -> None:
    requests = make_requests(7)
    last = run(make_engine(poison(*names, at=at), max_batch_tokens=budget), requests)
    for request in requests:
        first = request.prompt_ids[-1] + 1
        if request.request_id in names:
            assert request.finish_reason == "error" and request.request_id in str(request.exception)
            assert request.output_ids == list(range(first, first + at))
        else:
            assert request.output_ids == list(range(first, first + 5)), request.request_id
    assert len(last) == len(requests)


def test_one_request_alone() -> None:
    requests = make_requests(1)
    engine = make_engine(poison("r0", at=2))
    run(engine, requests)
    assert isinstance(requests[0].exception, ValueError)
    later = Request("later", [1, 2], SamplingParams(2))
    run(engine, [later])
    assert later.output_ids == [3, 4]


def test_a_fault_that_is_gone_the_second_time() -> None:
    calls = []

    def fault(batch: StepBatch) -> None:
        calls.append(len(batch.requests))
        if len(calls) == 3:
            raise OSError("once")

    requests = make_requests(4)
    run(make_engine(fault), requests)
    assert all(r.exception is None and r.num_output == 5 for r in requests)
    assert max(calls[3:5]) <= 2 and 4 in calls[5:], "two halves, then all together again"


def test_out_of_memory_halves_the_step() -> None:
    sizes = []

    def fault(batch: StepBatch) -> None:
        sizes.append(len(batch.input_ids))
        if len(batch.input_ids) > 5:
            raise torch.OutOfMemoryError("too much")

    requests = [*make_requests(6, prompt=3), Request("long", list(range(40)), SamplingParams(4))]
    run(make_engine(fault, max_batch_tokens=64), requests)
    assert all(r.exception is None for r in requests), "every request fits in small chunks"
    assert max(sizes) > 5 and sum(size > 5 for size in sizes) < 8, "the budget stays small for a while"


def test_a_shortage_that_comes_back_is_asked_for_less_and_less_often() -> None:
    sizes = []

    def fault(batch: StepBatch) -> None:
        sizes.append(len(batch.input_ids))
        if len(batch.input_ids) > 5:
            raise MemoryError

    run(make_engine(fault, max_batch_tokens=64), make_requests(20, prompt=4, new_tokens=100))
    assert 2 < sum(size > 5 for size in sizes) < 20 < len(sizes) / 20


def test_a_shortage_of_long_ago_is_forgotten() -> None:
    short = [True]

    def fault(batch: StepBatch) -> None:
        if short[0] and len(batch.input_ids) > 5:
            raise MemoryError

    engine = make_engine(fault, max_batch_tokens=32, num_blocks=400)
    for _ in range(3):
        short[0] = True
        run(engine, make_requests(3))
        assert engine.recovery.budget is not None
        short[0] = False
        run(engine, make_requests(3, new_tokens=400))
        assert engine.recovery.budget is None and engine.recovery._patience == 64


def test_out_of_memory_makes_the_others_give_way_and_then_ends_one() -> None:
    """Two requests fit together, three do not, and one is too large even alone."""
    engine: Engine

    def fault(batch: StepBatch) -> None:
        if any(r.request_id == "huge" for r in batch.requests) or len(engine.scheduler.running) > 2:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate ...")

    requests = [*make_requests(4), Request("huge", [1, 2, 3], SamplingParams(4))]
    engine = make_engine(fault)
    run(engine, requests)
    assert [r.exception is None for r in requests] == [True] * 4 + [False]


def test_a_fault_of_the_model_itself_ends_the_engine_at_once() -> None:
    def fault(batch: StepBatch) -> None:
        raise ModelChangedError("moved")

    engine = make_engine(fault)
    for request in make_requests(3):
        engine.admit(request)
    with pytest.raises(ModelChangedError):
        engine.step()
    assert len(engine.runner.batches) == 1


def test_if_request_after_request_fails_alone_it_is_not_about_requests() -> None:
    def fault(batch: StepBatch) -> None:
        raise ZeroDivisionError

    engine = make_engine(fault, num_blocks=200)
    requests = make_requests(40)
    for request in requests:
        engine.admit(request)
    with pytest.raises(ZeroDivisionError):
        for _ in range(500):
            engine.step()
    assert sum(r.finish_reason == "error" for r in requests) < 20


@pytest.mark.parametrize("order", ["first", "last"])
def test_mates_that_end_by_themselves_are_no_evidence(order: str) -> None:
    """Neither are several poisoned ones: the engine goes on."""
    good = [Request(f"good{i}", [10 * i, 1], SamplingParams(1)) for i in range(3)]
    bad = [Request(f"bad{i}", [10 * i, 2], SamplingParams(1)) for i in range(2)]
    engine = make_engine(poison("bad0", "bad1"))
    run(engine, bad + good if order == "first" else good + bad)
    run(engine, [Request("later", [1, 2], SamplingParams(1))])
    assert [r.finish_reason for r in good + bad] == ["length"] * 3 + ["error"] * 2


def test_what_is_cancelled_meanwhile_does_not_hold_up_the_rest() -> None:
    requests = make_requests(6)
    engine = make_engine(poison("r1", at=1))
    for request in requests:
        engine.admit(request)
    while not engine.recovery.groups:
        engine.step()
    for request in requests[:4]:
        engine.cancel(request)
    while engine.has_work:
        engine.step()
    engine.check_idle()
    assert [r.finish_reason for r in requests] == ["cancelled"] * 4 + ["length"] * 2


@pytest.mark.parametrize("bad", ["r0", "r0__child#1"])
def test_forks(bad: str) -> None:
    (first,) = make_requests(1)
    children = [Request(f"r0__child#{i}", first.prompt_ids, SamplingParams(5), fork_of=first) for i in range(3)]
    requests = [first, *children]
    run(make_engine(poison(bad), max_batch_tokens=16), requests)
    assert [r.request_id for r in requests if r.exception is not None] == [bad]
    assert all(r.num_output == 5 for r in requests if r.request_id != bad)


def test_few_blocks() -> None:
    """The others hold the blocks that a suspect needs to run again: they give way."""
    requests = make_requests(6, prompt=9, new_tokens=12)
    engine = make_engine(poison("r2", at=3), num_blocks=14, max_batch_tokens=12)
    run(engine, requests)
    assert [r.finish_reason for r in requests] == ["length", "length", "error", "length", "length", "length"]
    assert set(engine.runner.forgotten) >= {r.request_id for r in requests}
