"""A model whose layers lie on two GPUs, without a GPU: PyTorch's fake tensors have a device and no values, and an
operation on tensors of two devices raises."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from running import run_all
from tiny_models import SHAPE, make_model, make_prompts
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from hf_cb.attention import interception
from hf_cb.attention.masks import MaskMark
from hf_cb.attention.pages import Meta, PagesBackend, Storage, store
from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams
from hf_cb.engine.engine import Engine
from hf_cb.engine.sampler import Sampler
from hf_cb.models.groups import group_layers
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import plan_paged

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
FIRST, SECOND = torch.device("lazy:0"), torch.device("lazy:1")


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make = MaskMark.of

    def make_mark(spec: Any, device: Any) -> MaskMark:
        with unset_fake_temporarily():  # a fake tensor can be of no other class
            return make(spec, "cpu")

    monkeypatch.setattr(MaskMark, "of", make_mark)
    monkeypatch.setattr(MaskMark, "to", lambda mark, *_, **__: mark)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    interception.install(__name__)
    yield
    interception.uninstall(__name__)


class Pages(PagesBackend):
    """Where everything has to be; the values do not matter."""

    name = "pages"

    def __init__(self) -> None:
        self.attended: Counter[torch.device] = Counter()

    def missing(self) -> None: ...

    def unsupported(self, layer: Any) -> None: ...

    def attend(
        self, storage: Storage, layer: Any, q: Tensor, k: Tensor, v: Tensor, meta: Meta, sinks: Tensor | None
    ) -> Tensor:
        self.attended[q.device] += 1
        needed = (k, v, *storage, meta.slot_mapping, meta.block_table, meta.cu_seqlens_q, meta.seq_lens)
        assert {tensor.device for tensor in needed} == {q.device}
        store(storage, k, v, meta.slot_mapping)
        return torch.zeros(*q.shape[:2], layer.v_head_dim, dtype=q.dtype, device=q.device)


def spread(model: Any, mode: FakeTensorMode) -> None:
    """The first half of the layers there, the second and the head here, as `device_map` does it."""
    half = len(model.model.layers) // 2
    places = dict.fromkeys(model.modules(), FIRST)
    for part in (*model.model.layers[half:], model.lm_head):
        places |= dict.fromkeys(part.modules(), SECOND)
    for module, place in places.items():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = mode.from_tensor(tensor.detach()).to(place)
                    tensors[name] = torch.nn.Parameter(fake, False) if tensors is module._parameters else fake
    for layer in (*model.model.layers, *model.model.children(), model.lm_head):
        place = places[layer]
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.AlignDevicesHook(place))
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook(FIRST, io_same_device=True))


class FarPaged(PagedModel):
    """Its forward computes nothing; the tokens are those of rows of zeros."""

    mode: FakeTensorMode
    copied = False

    def forward(self, batch: Any) -> Tensor:
        self.copied |= any(group.copies for group in batch.groups)
        with self.mode:
            logits = super().forward(batch)
        assert isinstance(logits, Tensor) and logits.device == FIRST
        return torch.zeros(logits.shape)


def make_engine(model: Any, host_blocks: int, **options: Any) -> tuple[Engine, Pages]:
    plan = plan_paged(model, EngineConfig(block_size=4, **options))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, warnings.catch_warnings():
        spread(model, mode)
        half = len(plan.trace.layers) // 2
        layers = [
            dataclasses.replace(layer, device=FIRST if i < half else SECOND)
            for i, layer in enumerate(plan.trace.layers)
        ]
        backend = Pages()
        config = dataclasses.replace(plan.config, host_blocks=host_blocks)
        sizes = (config.num_blocks, config.block_size, host_blocks)
        groups = group_layers(layers, 256)
        runner = FarPaged(model, dataclasses.replace(plan.trace, layers=layers), groups, backend, *sizes)
        runner.mode = mode
    engine = Engine(runner, config, sampler=Sampler())
    engine.recovers = False
    return engine, backend


def lfm2() -> Any:
    options = SHAPE | {"layer_types": ["conv", "full_attention"] * 2}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**options)).eval()


MODELS = {
    "Llama": lambda: make_model("Llama"),
    "Mistral": lambda: make_model("Mistral"),
    "Gemma3": lambda: make_model("Gemma3"),
    "Lfm2": lfm2,
}


@pytest.mark.parametrize("name", MODELS)
def test_everything_is_where_it_is_needed(name: str) -> None:
    """Prompts in chunks, decodes, requests that give way, keep their keys in the host's memory and come back."""
    blocks = make_engine(MODELS[name](), 0, num_blocks=1000)[0].kv.blocks_for(38, 12) + 3
    has_states = name == "Lfm2"
    engine, backend = make_engine(MODELS[name](), 0 if has_states else 40, num_blocks=blocks, max_batch_tokens=12)
    prompts = make_prompts([13, 9, 30, 14])
    requests = [Request(f"r{i}", prompt, SamplingParams(8)) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.admit(request)
    for _ in range(300):
        if not engine.has_work:
            break
        engine.step()
    assert [request.finish_reason for request in requests] == ["length"] * 4
    assert sum(request.metrics.preemptions for request in requests) > 0
    assert set(backend.attended) == {FIRST, SECOND}
    engine.check_idle()


def test_a_fork_copies_a_block() -> None:
    engine, _ = make_engine(make_model("Llama"), 0, num_blocks=100)
    first = Request("first", make_prompts([11])[0], SamplingParams(4))
    run_all(engine, [first, Request("second", first.prompt_ids, SamplingParams(4), fork_of=first)])
    assert engine.runner.copied
