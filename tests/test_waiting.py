"""Nothing in a step makes the host wait for the device, so that the next one is launched while this one runs."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from far_device import DEVICE, Waiting, Watch, far_device, move
from recorded import TensorBackend
from tiny_models import make_model, make_prompts

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams
from hf_cb.engine.device_sampler import DeviceSampler, sampler_for
from hf_cb.engine.engine import Engine
from hf_cb.errors import OptionError
from hf_cb.kernels.device import fetched, finish, host_room, sent
from hf_cb.manager.build import build_engine
from hf_cb.models.drawing import Settings
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import plan_paged
from hf_cb.penalties import Penalties
from hf_cb.steps import Drawn
from hf_cb.warpers import Warpers

pytestmark = pytest.mark.usefixtures("intercepted")

TOLD = dict(logprobs=True, top_logprobs=3, prompt_logprobs=2, output_logits=True, output_scores=True)
WARPED = dict(do_sample=True, seed=7, warpers=Warpers(temperature=0.7, top_k=5))


def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the numbers say what it does")


PENALTIES = Penalties(repetition=1.3, banned=(7,), bias=((5, 1.0),), presence=0.5)
PENALISED = dict(penalties=PENALTIES, warpers=Warpers(), process=process)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    with far_device(monkeypatch) as found:
        yield found


def draw(logits: torch.Tensor, settings: Settings) -> Drawn:
    """In place of the Triton kernel."""
    assert all(setting.device == logits.device for setting in settings)
    return Drawn(logits.argmax(-1), logits[:, 0].float())


def far_engine(family: str, host_blocks: int = 0, **options: Any) -> Engine:
    """An engine of a model that is traced here, and then there."""
    model = make_model(family)
    plan = plan_paged(model, EngineConfig(block_size=4, overlap=True, **options))
    move(model)
    trace = dataclasses.replace(plan.trace, layers=[dataclasses.replace(x, device=DEVICE) for x in plan.trace.layers])
    config = dataclasses.replace(plan.config, host_blocks=host_blocks)
    sizes = (config.num_blocks, config.block_size, host_blocks)
    engine = Engine(PagedModel(model, trace, plan.groups, TensorBackend(), *sizes), config, sampler=DeviceSampler(draw))
    engine.recovers = False
    return engine


@pytest.mark.parametrize(
    ("family", "params"),
    [
        ("Llama", {}),
        ("Llama", dict(logprobs=True)),
        ("Llama", TOLD),
        ("Llama", WARPED),
        ("Llama", PENALISED),
        ("Mistral", {}),
        ("Gemma3", {}),
        ("Qwen3", {}),
    ],
)
def test_steps(family: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts([3, 9, 14])
    with far_device(monkeypatch) as watch:
        engine = far_engine(family, num_blocks=60)
        watch.copies.update(to=0)
        for i, prompt in enumerate(prompts):
            engine.admit(Request(f"r{i}", prompt, SamplingParams(8, **(params if i < 2 else {}))))
        seen, forward = [], engine.runner.forward
        monkeypatch.setattr(engine.runner, "forward", lambda batch: seen.append(list(watch.current)) or forward(batch))
        for _ in range(5):
            engine.step()
            assert not engine.is_settled
    assert seen == [[DEVICE]] * 5, "a thread's own current device is another"
    assert watch.copies["to"] >= 10 and watch.copies["from"] >= 5 and watch.current == []
    assert set(watch.events) == {"meta"}


def test_blocks_are_copied_saved_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, other = make_prompts([11, 14])
    with far_device(monkeypatch):
        engine = far_engine("Llama", host_blocks=20, num_blocks=9)
        first = Request("first", prompt, SamplingParams(20))
        requests = [
            first,
            Request("fork", prompt, SamplingParams(20), fork_of=first),
            Request("r", other, SamplingParams(6)),
        ]
        for r in requests:
            engine.admit(r)
        plans = []
        start = engine._start
        monkeypatch.setattr(engine, "_start", lambda before: plans.append(start(before)) or plans[-1])
        while engine.has_work:
            engine.step()
    made = [plan.plan for plan in plans if plan is not None]
    assert any(plan.saves for plan in made) and any(part.copies for plan in made for part in plan.parts)
    assert any(part.loads for plan in made for part in plan.parts)


def test_the_watch_sees_who_waits(watch: Watch) -> None:
    here, there = torch.ones(3), torch.ones(3, device=DEVICE)
    copies = (there.cpu, lambda: here.to(DEVICE), lambda: there.copy_(here))
    for waits in (there.tolist, there.nonzero, lambda: torch.tensor([1], device=DEVICE), lambda: there[[0]], *copies):
        with pytest.raises(Waiting):
            waits()
    with pytest.raises(Waiting, match="not pinned"):
        here.to(DEVICE, non_blocking=True)
    assert sent(here, DEVICE).device == DEVICE and fetched([there])()[0].device == here.device
    assert sent(there, DEVICE) is there, "where `torch.set_default_device` has put it"


def test_where_nothing_tells_that_a_copy_is_done_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    usual = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *args, **options: asked.append(options) or usual(x, *args, **options)
    )
    assert fetched([torch.ones(2)])()[0].tolist() == [1.0, 1.0]
    assert [options["non_blocking"] for options in asked] == [False]


def test_the_callers_autocast_is_left_out_on_the_models_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found out in the caller's thread must be what the loop's thread computes."""
    off, usual = [], torch.autocast

    def autocast(kind: str, **options: Any) -> Any:
        off.append((kind, options["enabled"]))
        return usual("cpu", **options)

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr("hf_cb.manager.build.device_of", lambda model: torch.device("cuda:1"))
    build_engine(make_model("Llama"), EngineConfig(num_blocks=8))
    assert sorted(set(off)) == [("cpu", False), ("cuda", False)] and len(off) == 4


def test_what_the_caller_has_begun_is_done_before_the_loop_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is filled with zeros on the caller's stream, which need not be the loop's."""
    with far_device(monkeypatch) as watch:
        finish([DEVICE, torch.device("cpu")])
        assert watch.finished == ["meta"]
    told = []
    monkeypatch.setattr("hf_cb.manager.build.finish", lambda devices: told.append(set(devices)))
    build_engine(make_model("Llama"), EngineConfig(num_blocks=8))
    assert told == [{torch.device("cpu")}]


@pytest.mark.parametrize(("problem", "draws"), [("compute capability 7.5 is below 8.0", False), (None, True)])
def test_on_an_old_gpu_rows_are_sampled_one_by_one(
    problem: str | None, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("hf_cb.models.drawing.device_problem", lambda device: problem)
    found = sampler_for(torch.device("cuda"))
    assert isinstance(found, DeviceSampler) and (found._draw is not None) == draws


# ------------------------------------------------------------------------------------------------------- host's memory


class Runtime:
    """CUDA's, as far as memory of the host's is concerned."""

    def __init__(self, failure: int = 0) -> None:
        self.failure = failure
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered[address] = size
        return self.failure

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_host_blocks_take_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the next power of two."""
    runtime, done = Runtime(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    device = torch.device("cuda:1")
    room = host_room((3, 5, 7), torch.bfloat16, device)
    rows = room[1:2]
    assert runtime.registered == {room.data_ptr(): 3 * 5 * 7 * 2}
    del room
    gc.collect()
    assert runtime.registered and not done, "a part of it is in use"
    del rows
    gc.collect()
    assert not runtime.registered and done == [device]


def test_more_than_the_host_can_pin_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(failure=2))
    with pytest.raises(RuntimeError, match=r"40 bytes of host memory cannot be pinned \(CUDA error 2\)"):
        host_room((10,), torch.float32, torch.device("cuda:0"))

    def refuse(*_: Any) -> torch.Tensor:
        raise RuntimeError("so much cannot be pinned")

    monkeypatch.setattr("hf_cb.models.paged.host_room", refuse)
    plan = plan_paged(model := make_model("Llama"), EngineConfig(block_size=4, num_blocks=8))
    with pytest.raises(OptionError, match="cpu_offload_space is more than the host has to give .so much"):
        PagedModel(model, plan.trace, plan.groups, TensorBackend(), 8, 4, 2)
