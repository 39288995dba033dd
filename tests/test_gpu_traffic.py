"""Random traffic on all that a GPU's engine does at once, on a CPU: steps that overlap, recorded decodes, tokens that
stay on the device, keys that go to the host and back; with faults in the middle of it, requests that are cancelled or
late, and weights that move. Whatever is answered is as `generate` has it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorded import Recorded, TensorBackend, draw_by_hash
from running import run_all
from tiny_models import generate_alone, greedy, make_model, make_prompts
from torch import Tensor

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams, Status
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.engine import Engine
from hf_cb.engine.sampler import Sampler
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import plan_paged
from hf_cb.models.recorded.captured import CapturedModel
from hf_cb.warpers import Warpers

pytestmark = pytest.mark.usefixtures("intercepted")

PROMPTS, LONGEST = make_prompts([1, 2, 5, 9, 14, 20, 26]), 24
MODELS = {family: make_model(family) for family in ("Llama", "Mistral", "Gemma3")}
known: dict[tuple[str, int], list[int]] = {}
DRAWN = dict(do_sample=True, warpers=Warpers(temperature=1.5), seed=5)


def answer(family: str, prompt: list[int]) -> list[int]:
    key = family, len(prompt)
    if key not in known:
        known[key] = generate_alone(MODELS[family], prompt, greedy(LONGEST))
    return known[key]


def drawn_answer(family: str, prompt: list[int]) -> list[int]:
    """By an engine of its own, step by step."""
    key = family + " drawn", len(prompt)
    if key not in known:
        plan = plan_paged(MODELS[family], EngineConfig(num_blocks=200, block_size=4))
        runner = PagedModel(MODELS[family], plan.trace, plan.groups, TensorBackend(), 200, 4)
        engine = Engine(runner, plan.config, sampler=DeviceSampler(draw_by_hash))
        request = Request("alone", prompt, SamplingParams(LONGEST, **DRAWN))
        run_all(engine, [request])
        known[key] = request.output_ids
    return known[key]


def make_engine(rng: random.Random, family: str) -> Engine:
    size, budget = rng.choice([2, 4, 8]), rng.choice([3, 5, 9, 40])
    options = dict(block_size=size, max_batch_tokens=budget, max_num_seqs=rng.choice([2, 4, 8]), max_model_len=64)
    options["prefix_caching"] = rng.random() < 0.6
    plan = plan_paged(MODELS[family], EngineConfig(num_blocks=2000, overlap=True, **options))
    groups, most = plan.groups, max(map(len, PROMPTS)) + LONGEST
    blocks = sum(g.max_blocks(most, budget, size) for g in groups) + rng.choice([0, 1, 2, 5, 20, 100])
    config = replace(plan.config, num_blocks=blocks, host_blocks=rng.choice([0, 5, 30, 200]))
    arguments = (MODELS[family], plan.trace, groups, TensorBackend(), blocks, size, config.host_blocks)
    recorded = CapturedModel(lambda _: Recorded, draw_by_hash, config.max_num_seqs, -(-64 // size), *arguments)
    runner = recorded if rng.random() < 0.5 else PagedModel(*arguments)
    sampler = DeviceSampler(draw_by_hash) if rng.random() < 0.7 else Sampler(native=False)
    return Engine(runner, config, sampler=sampler)


def failing(work: Callable[..., Any], rng: random.Random, share: float, faults: list[Exception]) -> Callable[..., Any]:
    """`work`, which sometimes raises before or after it is done."""

    def call(*args: Any) -> Any:
        late, fails = rng.random() < 0.5, rng.random() < share
        out = work(*args) if late or not fails else None
        if fails:
            faults.append(rng.choice([ValueError("a fault"), torch.OutOfMemoryError("no memory")]))
            raise faults[-1]
        return out

    return call


def make_request(
    rng: random.Random, family: str, name: str, others: list[Request], draws: bool
) -> tuple[Request, list[int]]:
    """A request, and what is to come of it if nothing comes between. `draws`: some are not greedy."""
    if draws and rng.random() < 0.3:
        prompt, new = rng.choice(PROMPTS), rng.choice([2, 7, LONGEST])
        params = SamplingParams(new, logprobs=rng.random() < 0.2, **DRAWN)
        return Request(name, prompt, params), drawn_answer(family, prompt)[:new]
    source = rng.choice(others) if others and rng.random() < 0.15 else None
    prompt = list(source.prompt_ids) if source is not None else rng.choice(PROMPTS)
    full = answer(family, prompt)
    want, options = full[: rng.choice([1, 2, 7, 12, LONGEST])], dict[str, Any](logprobs=rng.random() < 0.2)
    new, way, last = len(want), rng.random(), rng.choice(want)
    if way < 0.35:
        want = want[: want.index(last) + 1]
        ends: Any = (
            dict(eos_token_ids=frozenset({last})) if way < 0.2 else dict(stop_checks=(lambda ids: ids[-1] == last,))
        )
        options |= ends
    elif way < 0.5:

        def process(ids: Tensor, scores: Tensor) -> Tensor:
            assert ids[0].tolist() == prompt + full[: ids.shape[1] - len(prompt)], "a token that was not read yet"
            return scores

        options["process"] = process
    request = Request(name, prompt, SamplingParams(new, **options), fork_of=source)
    if rng.random() < 0.08:
        request.deadline = time.perf_counter() + rng.random() * 0.05
    return request, want


def move_weights(model: Any) -> None:
    for p in model.parameters():
        before, p.data = p.data, p.data.clone()
        before.fill_(float("nan"))


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic(seed: int) -> None:
    rng, faults = random.Random(seed), list[Exception]()
    family = rng.choice(list(MODELS))
    engine, share = make_engine(rng, family), rng.choice([0, 0, 0.02, 0.1])
    engine.runner.forward = failing(engine.runner.forward, rng, share, faults)
    engine.sampler.sample = failing(engine.sampler.sample, rng, share / 2, faults)
    draws = isinstance(engine.sampler, DeviceSampler)
    coming, wanted = rng.randint(4, 14), dict[Request, list[int]]()
    while len(wanted) < coming or engine.has_work:
        if len(wanted) < coming and (rng.random() < 0.5 or not engine.has_work):
            request, want = make_request(rng, family, f"r{len(wanted)}", list(wanted), draws)
            wanted[request] = want
            engine.admit(request)
        if rng.random() < 0.04:
            engine.cancel(rng.choice(list(wanted)))
        if rng.random() < 0.03:
            engine.settle()
        if rng.random() < 0.02:
            engine.settle()
            engine.weights_written()
            move_weights(MODELS[family])
        engine.step()
    engine.check_idle()
    for request, want in wanted.items():
        assert request.status is Status.FINISHED and request.in_flight == request.ahead == 0
        assert request.output_ids == want[: request.num_output]
        assert len(request.logprobs) == request.num_output * request.params.logprobs
        if request.finish_reason in ("stop", "length"):
            assert request.output_ids == want
        else:
            assert request.finish_reason in ("cancelled", "timeout") or request.exception in faults
