"""Random traffic under every policy: nobody is lost or waits for ever, budgets hold, and every block comes back."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_runner import VOCAB, FakeRunner, resolved

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams, Status
from hf_cb.engine.engine import Engine
from hf_cb.engine.simulation import SimulatedClock, SimulatedRequest, Simulation
from hf_cb.policies import POLICIES, make_policy
from hf_cb.steps import StepBatch, StepPlan

ALL = [
    "continuous",
    "prefill_first",
    "priority:2",
    "fair:a=3",
    "deadline:5",
    "longest_prefix:1",
    "static:4:3",
    "dynamic:4:2",
]
BAD = 777  # a token with which the forward raises


def test_all_policies_are_here() -> None:
    assert {make_policy(p).name for p in ALL} == set(POLICIES)


class Ticking(FakeRunner):
    """A step takes a second; some raise."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.clock.now += 1.0
        if BAD in batch.input_ids.tolist():
            raise ValueError("bad")
        return super().forward(batch)


def traffic(rng: random.Random, clock: SimulatedClock, max_tokens: int) -> list[Request]:
    requests: list[Request] = []
    for i in range(40):
        start, length, new = rng.randrange(600), rng.randint(1, 20), rng.randint(1, 12)
        prompt = [(start + j) % 700 for j in range(length)]
        if requests and rng.random() < 0.3:
            prompt = (rng.choice(requests).prompt_ids + prompt)[:20]
        if rng.random() < 0.05:
            prompt[0] = BAD
        own: dict[str, Any] = dict(priority=rng.randint(-2, 2), user=rng.choice(["a", "b", None]))
        fork = requests[-1] if requests and rng.random() < 0.15 else None
        if fork is not None:
            prompt = list(fork.prompt_ids)
            own = dict(priority=fork.priority, user=fork.user)
        deadline = rng.choice([None, None, 5.0, 40.0, 400.0])
        new = min(new, max_tokens - len(prompt) + 1)
        requests.append(Request(f"r{i}", prompt, SamplingParams(new), fork_of=fork, deadline=deadline, **own))
    return requests


def check_prompts(engine: Engine) -> None:
    """Where answers are running, all prompts of the step together stay within `prefill_chunk`."""
    usual = engine.scheduler.plan

    def plan(*args: Any, **options: Any) -> StepPlan:
        answers = any(r.is_decoding for r in engine.scheduler.running)
        found = usual(*args, **options)
        prompt_tokens = sum(p.num_tokens for p in found.parts if not p.was_decoding)
        assert not answers or prompt_tokens <= engine.config.prefill_chunk
        return found

    engine.scheduler.plan = plan


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ALL)
def test_random_traffic(name: str, seed: int) -> None:
    rng, clock = random.Random(f"{name} {seed}"), SimulatedClock()
    block_size = rng.choice([1, 3, 8])
    blocks = -(-32 // block_size) + rng.choice([0, 2, 200])
    config = resolved(
        block_size=block_size,
        num_blocks=blocks,
        max_batch_tokens=rng.choice([1, 5, 40]),
        max_num_seqs=rng.choice([1, 3, 64]),
        prefill_chunk=rng.choice([None, 1, 4]),
        itl_target=rng.choice([None, 0.5, 2.0]),
        overlap=rng.random() < 0.5,
        prefix_caching=rng.random() < 0.7,
    )
    config = replace(config, host_blocks=rng.choice([0, 7, 100]))
    engine = Engine(Ticking(clock), config, make_policy(name), clock=clock)
    check_prompts(engine)
    requests = traffic(rng, clock, max_tokens=31)
    coming, steps = list(requests), 0
    while coming or engine.has_work:
        for _ in range(rng.choice([0, 0, 0, 1, 5])):
            if coming:
                coming[0].created = clock.now
                if coming[0].deadline is not None:
                    coming[0].deadline += clock.now
                engine.admit(coming.pop(0))
        if rng.random() < 0.03 and len(coming) < len(requests):
            engine.cancel(rng.choice(requests[: len(requests) - len(coming)]))
        engine.scheduler.close(not coming and rng.random() < 0.5)
        engine.step()
        if engine.has_work and engine.idle_s() > 0:
            clock.now += max(engine.idle_s(), 1e-9)
        elif not engine.has_work:
            clock.now += 1.0
        steps += 1
        assert steps < 5000, "somebody waits for ever"
    for r in requests:
        assert r.status is Status.FINISHED
        want = [(r.prompt_ids[-1] + 1 + i) % VOCAB for i in range(r.params.max_new_tokens)]
        assert r.output_ids == want[: r.num_output]
        if r.finish_reason == "length":
            assert r.num_output == r.params.max_new_tokens
        elif r.finish_reason == "error":
            assert BAD in r.prompt_ids
        else:
            assert r.finish_reason in ("cancelled", "timeout")
    engine.check_idle()
    for record in engine.records:
        assert record.query_tokens <= record.tokens_allowed <= config.max_batch_tokens
        assert record.requests <= config.max_num_seqs and record.blocks_used <= blocks


def test_a_place_is_taken_though_steps_overlap() -> None:
    clock = SimulatedClock()
    engine = Engine(Ticking(clock), resolved(overlap=True, max_num_seqs=1), make_policy("priority"), clock=clock)
    slow, urgent = (
        Request(n, [1], SamplingParams(20), priority=p, created=0.0) for n, p in (("slow", 1), ("urgent", 0))
    )
    engine.admit(slow)
    for _ in range(4):
        engine.step()
    engine.admit(urgent)
    while engine.has_work:
        engine.step()
    assert urgent.finished < slow.finished and slow.metrics.preemptions == 1
    assert slow.output_ids == urgent.output_ids == list(range(2, 22))
    engine.check_idle()


RIVALS: dict[str, dict[str, Any]] = {
    "priority:2": dict(priority=-3),
    "fair": dict(user="crowd"),
    "deadline:9": dict(deadline=30.0),
    "longest_prefix:9": dict(prefix="system", prefix_tokens=8),
}


@pytest.mark.parametrize("name", [*RIVALS, "continuous", "prefill_first", "static:2", "dynamic:2"])
def test_nobody_starves_beside_a_stream_of_preferred_requests(name: str) -> None:
    """More come than can be served, and each of them goes before the one that came first."""
    rivals = [SimulatedRequest(f"r{i}", 9, 3, arrival=1.0 + i, **RIVALS.get(name, {})) for i in range(100)]
    given = [SimulatedRequest("first", 1, 9), SimulatedRequest("unloved", 9, 3, arrival=1.0, user="u"), *rivals]
    simulation = Simulation(given, EngineConfig(policy=name, max_num_seqs=2, block_size=4))
    list(simulation)
    first, unloved, *others = simulation.requests
    assert all(r.finish_reason in ("length", "timeout") for r in others)
    assert unloved.finish_reason == "length" and unloved.started < 40
    assert max(r.finished for r in others) > 100, "there was too little traffic to starve anybody"
