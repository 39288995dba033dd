"""Random traffic in which some requests ask for the log-probabilities of their prompts: tiny caches, any chunks,
cancels, two steps in flight, sequences that share a prompt."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tiny_models import make_model, make_prompts

from hf_cb.attention import interception
from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams, Status
from hf_cb.engine.engine import Engine
from hf_cb.engine.flight import InFlight
from hf_cb.manager.build import build_engine


@pytest.fixture(scope="module", params=["Llama", "Gemma3"])
def world(request):
    """A model, prompts that partly share their beginnings, and each prompt's log-softmax."""
    model, rng = make_model(request.param), random.Random(request.param)
    prompts = make_prompts([rng.randint(1, 30) for _ in range(12)])
    for i in range(0, 12, 3):
        prompts[i] = (prompts[i + 1] + prompts[i])[:30]
    with torch.no_grad():
        return model, prompts, [model(torch.tensor([p])).logits[0].log_softmax(-1) for p in prompts]


@pytest.mark.parametrize("seed", range(6))
def test_each_token_is_told_once(world, seed: int) -> None:
    model, prompts, want = world
    rng = random.Random(seed)
    options = EngineConfig(
        block_size=rng.choice([1, 3, 4, 8]),
        max_batch_tokens=rng.choice([2, 3, 8, 64]),
        max_num_seqs=rng.choice([2, 5, 64]),
        prefill_chunk=rng.choice([None, 1, 4]),
        num_blocks=100_000,
    )
    interception.install(__name__)
    try:
        longest = build_engine(model, options).kv.blocks_for(40, options.max_batch_tokens)
        options.num_blocks = longest + rng.choice([0, 1, 3, 200])
        engine = build_engine(model, options)
        requests: list[Request] = []
        for i in range(24):
            asked = rng.choice([None, 0, 2])
            params = SamplingParams(0 if asked is not None and rng.random() < 0.3 else rng.randint(1, 10))
            first = Request(f"r{i}", prompts[i % 12], replace(params, prompt_logprobs=asked))
            requests.append(first)
            if params.max_new_tokens and rng.random() < 0.3:
                child = Request(f"r{i}c", first.prompt_ids, first.params, fork_of=first)
                child.prompt_logprobs = first.prompt_logprobs
                requests.append(child)
        drive(engine, requests, rng)
    finally:
        interception.uninstall(__name__)
    engine.check_idle()
    for request in requests:
        told, prompt = request.prompt_logprobs, request.prompt_ids
        assert len(told) <= len(prompt) - 1
        if request.params.prompt_logprobs is None:
            assert not told
        elif request.finish_reason != "cancelled":
            assert len(told) == len(prompt) - 1
        rows = want[prompts.index(prompt)]
        for i, found in enumerate(told):
            assert found[prompt[i + 1]] == pytest.approx(float(rows[i, prompt[i + 1]]), abs=1e-4)
            assert len(found) >= request.params.prompt_logprobs


def drive(engine: Engine, requests: list[Request], rng: random.Random) -> None:
    coming = list(requests)
    flights: list[InFlight] = []
    while coming or engine.has_work or flights:
        for _ in range(rng.choice([0, 1, 5])):
            if coming:
                engine.admit(coming.pop(0))
        if rng.random() < 0.05:
            victim = rng.choice(requests)
            if victim not in coming:
                engine.cancel(victim)
        flight = engine.launch() if engine.has_work else None
        if flight is not None:
            flights.append(flight)
        while flights and (len(flights) == 2 or rng.random() < 0.6):
            engine.commit(flights.pop(0))
    assert all(r.status is Status.FINISHED for r in requests)
