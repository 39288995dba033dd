"""A step is launched while the one before it is not read yet: the same tokens, at most one discarded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fake_runner import FakeRunner, make_engine, request, resolved
from running import run_all
from tiny_models import generate_alone, greedy, make_prompts

from hf_cb.attention import interception
from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams, Status
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.engine import Engine
from hf_cb.engine.sampler import Sampler
from hf_cb.manager.build import build_engine
from hf_cb.models.sending import to_device

SAMPLERS = {"host": lambda: Sampler(native=False), "device": DeviceSampler}


@pytest.fixture(params=list(SAMPLERS))
def sampler(request: Any) -> Sampler:
    """One that reads its tokens at once, and one that leaves them where they are."""
    return SAMPLERS[request.param]()


def test_a_step_starts_before_the_one_before_it_is_committed(sampler: Sampler) -> None:
    engine, r = make_engine(sampler=sampler, overlap=True), request("r", [1], 4)
    engine.admit(r)
    assert engine.step() == [] and r.output_ids == []
    seen = []
    while engine.has_work:
        in_flight = len(engine.runner.batches)
        updates = engine.step()
        seen.append((in_flight, [u.new_ids for u in updates]))
    assert r.output_ids == [2, 3, 4, 5]
    assert seen == [(1, [[2]]), (2, [[3]]), (3, [[4]]), (4, [[5]])]
    assert len(engine.runner.batches) == 4  # its length was known: no token too many
    assert [b.input_ids.tolist() for b in engine.runner.batches] == [[1], [2], [3], [4]]


def test_an_eos_costs_one_discarded_token(sampler: Sampler) -> None:
    engine = make_engine(sampler=sampler, overlap=True)
    r = Request("r", [1], SamplingParams(50, eos_token_ids=frozenset({4})))
    run_all(engine, [r])
    assert r.output_ids == [2, 3, 4] and r.finish_reason == "stop"
    assert len(engine.runner.batches) == 4


def test_a_cancelled_request_ends_at_the_next_commit(sampler: Sampler) -> None:
    engine, r, other = make_engine(sampler=sampler, overlap=True), request("r", [1], 50), request("o", [11], 3)
    for each in (r, other):
        engine.admit(each)
    engine.step()
    assert engine.cancel(r) is None
    updates = engine.step()
    assert r.finish_reason == "cancelled" and r in [u.request for u in updates]
    run_all(engine, [])
    assert r.output_ids == [] and other.output_ids == [12, 13, 14]


def test_who_is_late_ends_though_always_in_flight(sampler: Sampler) -> None:
    engine = make_engine(sampler=sampler, overlap=True, max_batch_tokens=1)
    r = Request("r", [1] * 200, SamplingParams(5, max_time=1e-6))
    run_all(engine, [r])
    assert r.finish_reason == "timeout" and len(engine.runner.batches) < 10


def test_settle_leaves_nothing_in_flight(sampler: Sampler) -> None:
    engine, r = make_engine(sampler=sampler, overlap=True), request("r", [1], 5)
    engine.admit(r)
    engine.step()
    assert not engine.is_settled
    assert [u.new_ids for u in engine.settle()] == [[2]] and engine.is_settled and not r.in_flight
    run_all(engine, [])
    assert r.output_ids == [2, 3, 4, 5, 6]


def test_a_forward_that_raises_loses_nothing_of_the_step_before_it(sampler: Sampler) -> None:
    class Bad(FakeRunner):
        def forward(self, batch: Any) -> torch.Tensor:
            if 13 in to_device(batch, self.device).input_ids.tolist():
                raise ValueError("thirteen")
            return super().forward(batch)

    engine = Engine(Bad(), resolved(overlap=True), sampler=sampler)
    good, bad = request("good", [1], 6), request("bad", [11], 6)
    for r in (good, bad):
        engine.admit(r)
    while engine.has_work:
        engine.step()
    engine.check_idle()
    assert good.output_ids == [2, 3, 4, 5, 6, 7]
    assert bad.finish_reason == "error" and bad.output_ids == [12, 13] and "thirteen" in str(bad.exception)


def test_a_request_short_of_blocks_waits_for_the_commit_and_the_newest_gives_way(sampler: Sampler) -> None:
    engine = make_engine(sampler=sampler, overlap=True, num_blocks=4, block_size=2)
    first, second = request("first", [1, 2], 5), request("second", [11, 12], 5)
    run_all(engine, [first, second])
    assert first.output_ids == [3, 4, 5, 6, 7] and second.output_ids == [13, 14, 15, 16, 17]
    assert first.metrics.preemptions == 0 and second.metrics.preemptions > 0


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(seed: int, sampler: Sampler, shared_llama: Any) -> None:
    """Tiny caches, cancellations, stops in the middle: what is not cancelled is as `generate` has it."""
    rng = random.Random(seed)
    prompts = make_prompts([rng.choice([1, 3, 9, 26]) for _ in range(10)])
    interception.install(__name__)
    try:
        options = dict(block_size=4, num_blocks=rng.choice([12, 16, 60]), max_batch_tokens=rng.choice([5, 40]))
        engine = build_engine(shared_llama, EngineConfig(overlap=True, max_num_seqs=rng.choice([3, 8]), **options))
        engine.sampler = sampler
        requests, coming = [Request(f"r{i}", p, SamplingParams(12)) for i, p in enumerate(prompts)], 0
        while coming < len(requests) or engine.has_work:
            if coming < len(requests) and rng.random() < 0.5:
                engine.admit(requests[coming])
                coming += 1
            if coming and rng.random() < 0.03:
                engine.cancel(rng.choice(requests[:coming]))
            engine.step()
    finally:
        interception.uninstall(__name__)
    for r, prompt in zip(requests, prompts, strict=True):
        want = generate_alone(shared_llama, prompt, greedy())
        assert r.status is Status.FINISHED
        assert r.output_ids == want[: r.num_output] and (r.num_output == 12 or r.finish_reason == "cancelled")
    engine.check_idle()
