"""Random traffic: arrivals at any step, tiny caches, any page size and budget, cancels, late commits; float32, token
for token against `generate`, and afterwards every block is accounted for."""

from __future__ import annotations

import random

import pytest
from tiny_models import generate_alone, greedy, make_model, make_prompts

from hf_cb.attention import interception
from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams, Status
from hf_cb.engine.engine import Engine, InFlight
from hf_cb.manager.build import build_engine
from hf_cb.policies import POLICIES

FAMILIES = ("Llama", "Gemma3", "Mistral")
NUM_PROMPTS = 24
LONGEST = 50  # prompt and output


@pytest.fixture(scope="module", params=FAMILIES)
def world(request):
    """A model, prompts that partly share their beginnings, and what `generate` answers."""
    model, rng = make_model(request.param), random.Random(request.param)
    prompts = make_prompts([rng.randint(1, 30) for _ in range(NUM_PROMPTS)])
    for i in range(0, NUM_PROMPTS, 3):
        prompts[i] = (prompts[(i + 1) % NUM_PROMPTS] + prompts[i])[:30]
    return model, prompts, [generate_alone(model, p, greedy(LONGEST - 30)) for p in prompts]


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic(world, seed: int) -> None:
    model, prompts, want = world
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 7, 8, 16, 33, 64])
    budget = rng.choice([1, 2, 3, 5, 8, 17, 64])
    options = EngineConfig(
        block_size=block_size,
        max_batch_tokens=budget,
        max_num_seqs=rng.choice([1, 2, 5, 64]),
        prefill_chunk=rng.choice([None, 1, 4]),
        prefix_caching=rng.random() < 0.7,
        policy=rng.choice([*(name for name in POLICIES if name != "static"), "static:5:0.001", "dynamic:4:0.001"]),
        num_blocks=1,
    )
    interception.install(__name__)
    try:
        options.num_blocks = _just_enough(model, options) + rng.choice([0, 1, 3, 200])
        engine = build_engine(model, options)
        requests = [
            Request(
                f"r{i}",
                prompts[i % NUM_PROMPTS],
                SamplingParams(rng.randint(1, LONGEST - 30)),
                priority=rng.randint(0, 2),
                user=rng.choice("ab"),
            )
            for i in range(40)
        ]
        drive(engine, requests, rng)
    finally:
        interception.uninstall(__name__)
    for i, request in enumerate(requests):
        expected = want[i % NUM_PROMPTS][: request.num_output]
        assert request.output_ids == expected, f"request {i} differs"
        assert request.finish_reason == "cancelled" or request.num_output == request.params.max_new_tokens
    engine.check_idle()
    for record in engine.records:
        assert record.query_tokens <= budget and record.requests <= record.requests_allowed
        assert record.blocks_used <= record.blocks_allowed


def _just_enough(model, options: EngineConfig) -> int:
    """The fewest blocks with which the longest request still fits alone."""
    options.num_blocks = 100_000
    engine = build_engine(model, options)
    return engine.kv.blocks_for(LONGEST - 1, options.max_batch_tokens or 1)


def drive(engine: Engine, requests: list[Request], rng: random.Random) -> None:
    """Admits, steps, cancels and commits at random; sometimes two steps are in flight."""
    coming, flights = list(requests), []
    while coming or engine.has_work or flights:
        for _ in range(rng.choice([0, 0, 1, 5])):
            if coming:
                engine.admit(coming.pop(0))
        if rng.random() < 0.05:
            victim = rng.choice(requests)
            if victim not in coming:
                engine.cancel(victim)
        launch(engine, flights)
        while flights and (len(flights) == 2 or rng.random() < 0.6):
            engine.commit(flights.pop(0))
    assert all(r.status is Status.FINISHED for r in requests)


def launch(engine: Engine, flights: list[InFlight]) -> None:
    flight = engine.launch() if engine.has_work else None
    if flight is not None:
        flights.append(flight)
