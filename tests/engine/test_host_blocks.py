"""Requests that give way keep what they have computed in the host's memory, and go on from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_runner import FakeRunner, make_engine, request, resolved
from recorded import TensorBackend
from running import run_all
from tiny_models import generate_alone, greedy, make_model, make_prompts

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.engine import Engine
from hf_cb.engine.host_blocks import HostBlocks
from hf_cb.errors import OptionError
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import plan_paged
from hf_cb.sizes import Surroundings, resolve

pytestmark = pytest.mark.usefixtures("intercepted")


def make(model: Any, host_blocks: int, **options: Any) -> Engine:
    plan = plan_paged(model, EngineConfig(block_size=4, prefix_caching=False, **options))
    config = replace(plan.config, host_blocks=host_blocks)
    sizes = (config.num_blocks, config.block_size, config.host_blocks)
    return Engine(PagedModel(model, plan.trace, plan.groups, TensorBackend(), *sizes), config, sampler=DeviceSampler())


def run(engine: Engine, requests: list[Request]) -> int:
    """Runs them to their end; the tokens that were computed."""
    run_all(engine, requests)
    return sum(record.query_tokens for record in engine.records)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family, budget, more", [("Llama", 50, 1), ("Mistral", 8, 3), ("Gemma3", 8, 0)])
def test_less_is_computed_twice(family: str, budget: int, more: int, overlap: bool) -> None:
    """Windows, and two groups of layers. Who gives way in the step that it came in with has nothing to save."""
    model, prompts = make_model(family), make_prompts([14, 9, 20, 5])
    want = [generate_alone(model, p, greedy(14)) for p in prompts]
    computed = {}
    for host_blocks in (0, 300):
        blocks = make(model, 0, num_blocks=1000).kv.blocks_for(34, budget) + more
        engine = make(model, host_blocks, num_blocks=blocks, overlap=overlap, max_batch_tokens=budget)
        requests = [Request(f"r{i}", p, SamplingParams(14)) for i, p in enumerate(prompts)]
        computed[host_blocks] = run(engine, requests)
        assert [r.output_ids for r in requests] == want
        assert sum(r.metrics.preemptions for r in requests) > 0
    assert computed[300] < computed[0]
    if family == "Llama":
        assert computed[300] == sum(map(len, prompts)) + 13 * len(prompts)


def test_too_little_room_means_computing_again() -> None:
    model, prompts = make_model("Llama"), make_prompts([14, 9, 20, 5])
    engine = make(model, 2, num_blocks=12)
    requests = [Request(f"r{i}", p, SamplingParams(14)) for i, p in enumerate(prompts)]
    run(engine, requests)
    assert [r.output_ids for r in requests] == [generate_alone(model, p, greedy(14)) for p in prompts]


def test_changed_weights_make_it_useless() -> None:
    engine = make_engine(num_blocks=3, block_size=2, prefix_caching=False)
    engine.scheduler.host = HostBlocks(20)
    first, second = request("first", [1, 2], 3), request("second", [11], 4)
    for r in (first, second):
        engine.admit(r)
    while not second.metrics.preemptions:
        engine.step()
    assert engine.scheduler.host.of(second) is not None
    engine.kv.drop_cache()
    run(engine, [])
    assert second.output_ids == [12, 13, 14, 15]
    assert engine.runner.batches[-1].groups[0].loads == []


def test_who_is_cancelled_while_saved_gives_the_host_blocks_back() -> None:
    engine = make_engine(num_blocks=3, block_size=2, prefix_caching=False)
    engine.scheduler.host = HostBlocks(20)
    first, second = request("first", [1, 2], 3), request("second", [11], 4)
    for r in (first, second):
        engine.admit(r)
    while not second.metrics.preemptions:
        engine.step()
    engine.cancel(second)
    run(engine, [])
    assert second.finish_reason == "cancelled"


def test_a_step_that_raises_has_saved_nothing() -> None:
    class Bad(FakeRunner):
        raised = False

        def forward(self, batch: Any) -> Any:
            if any(group.saves for group in batch.groups) and not self.raised:
                self.raised = True
                raise ValueError("before anything was copied")
            return super().forward(batch)

    engine = Engine(Bad(), resolved(num_blocks=5, block_size=2, prefix_caching=False))
    engine.scheduler.host = HostBlocks(20)
    requests = [request(f"r{i}", [10 * i + 1], 5) for i in range(3)]
    run(engine, requests)
    assert engine.runner.raised
    assert [r.output_ids for r in requests] == [[10 * i + k for k in range(2, 7)] for i in range(3)]


def test_sizes() -> None:
    around = Surroundings(1024, 2**30, "cuda", lambda size: 1000 * size)
    assert resolve(EngineConfig(cpu_offload_space="1MB", block_size=10), around).host_blocks == 100
    assert resolve(EngineConfig(cpu_offload_space=0), around).host_blocks == 0
    with pytest.raises(OptionError, match="cpu_offload_space is for a model on a GPU"):
        resolve(EngineConfig(cpu_offload_space="1MB"), replace(around, device_type="cpu"))
    with pytest.raises(OptionError, match="cpu_offload_space .* layers with a state"):
        resolve(EngineConfig(cpu_offload_space="1MB"), replace(around, state_bytes=100))
    with pytest.raises(OptionError, match="cpu_offload_space must be"):
        EngineConfig(cpu_offload_space="much")
