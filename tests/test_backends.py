"""Which backend computes which layers, why, and what hf-cb doctor says of it; several in one model."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from flash_stand_ins import attend
from handmade import part
from tiny_models import generate_alone, greedy, make_model, make_prompts
from torch import Tensor

import hf_cb
from hf_cb import EngineConfig, OptionError
from hf_cb.attention import backend as registry
from hf_cb.attention import trial, triton
from hf_cb.attention.choice import choose_backend, survey
from hf_cb.attention.pages import Meta, PagesBackend, Storage, store
from hf_cb.attention.reference import ReferenceBackend
from hf_cb.attention.several import SeveralBackends
from hf_cb.cli import main
from hf_cb.engine.batch import build
from hf_cb.steps import LayerFacts, StepPlan

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LAYER = LayerFacts(4, 2, 16, 16, scale=0.25, dtype=torch.float16, device=GPU)


class NoWindows(ReferenceBackend):
    name = "nowindows"
    block_multiple = 4
    calls = 0

    def unsupported(self, layer: LayerFacts) -> str | None:
        return "it has no windows" if layer.window else super().unsupported(layer)

    def graph_key(self, batch: Any) -> int:
        return 1

    def attend(self, *args: Any) -> Tensor:
        NoWindows.calls += 1
        return super().attend(*args)


class Fast(ReferenceBackend):
    """As a GPU's backend: not for CPUs unless by name."""

    name = "fast"
    device_types = frozenset({"cuda"})
    block_multiple = usual_block_size = 6
    lacks: str | None = None

    def missing(self) -> str | None:
        return self.lacks

    def graph_key(self, batch: Any) -> int:
        return 2


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"fast": Fast, "nowindows": NoWindows, "reference": ReferenceBackend}
    monkeypatch.setattr(registry, "backends", lambda: known)


# -------------------------------------------------------------------------------------------------------------- choice


def test_the_order_is_speed() -> None:
    known = registry.backends()
    assert list(known) == ["flash", "triton", "torch_varlen", "cpu", "reference"]
    assert all(kind.name == name for name, kind in known.items())
    gpu, cpu = (
        [name for name, kind in known.items() if kind.device_types is None or device in kind.device_types]
        for device in ("cuda", "cpu")
    )
    assert gpu == ["flash", "triton", "torch_varlen", "reference"] and cpu == ["cpu", "reference"]


@pytest.mark.usefixtures("three")
def test_the_layers_device_decides() -> None:
    backend, why = choose_backend(None, [LAYER])
    assert (backend.name, why) == ("fast", "the first choice on cuda")
    backend, why = choose_backend(None, [dataclasses.replace(LAYER, device=CPU)])
    assert (backend.name, why) == ("nowindows", "the first choice on cpu")
    backend, _ = choose_backend(None, [LAYER, dataclasses.replace(LAYER, device=CPU)])
    assert isinstance(backend, SeveralBackends) and backend.name == "fast+nowindows"


@pytest.mark.usefixtures("three")
def test_the_reason_says_what_was_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fast, "lacks", "it is not installed")
    windowed = dataclasses.replace(LAYER, window=8)
    backend, why = choose_backend(None, [LAYER, windowed])
    assert backend.name == "reference", "the two share a storage"
    assert why == "fast: it is not installed; nowindows: it has no windows"
    with pytest.raises(OptionError, match="attention='fast' cannot run this model: it is not installed"):
        choose_backend("fast", [LAYER])
    with pytest.raises(OptionError, match="attention='nowindows' cannot run this model: it has no windows"):
        choose_backend("nowindows", [LAYER, windowed])
    with pytest.raises(OptionError, match="attention='slow' is unknown; the backends are fast, nowindows, reference"):
        choose_backend("slow", [LAYER])
    with pytest.raises(OptionError, match="No attention backend.*fast.*; nowindows.*; reference: 5 query heads"):
        choose_backend(None, [dataclasses.replace(windowed, num_heads=5)])


@pytest.mark.usefixtures("three")
def test_a_block_size_that_a_backend_cannot_have() -> None:
    assert choose_backend(None, [LAYER], block_size=12)[0].name == "fast"
    backend, why = choose_backend(None, [LAYER], block_size=32)
    assert backend.name == "nowindows" and why.startswith("fast: its blocks have a multiple of 6 tokens, not 32")
    with pytest.raises(OptionError, match="multiple of 6 tokens, not 32: leave block_size unset, or give 6"):
        choose_backend("fast", [LAYER], block_size=32)


@pytest.mark.usefixtures("three", "patched")
def test_the_block_size_is_the_backends_usual_one() -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model, attention="fast")
    found = hf_cb.explain(model)
    assert found.backend == "fast" and found.config["block_size"] == "6 (usual for the attention backend)"
    hf_cb.restore(model)
    assert hf_cb.explain(model).config["block_size"].startswith("32 ")


def test_without_attention_any_backend_will_do() -> None:
    assert choose_backend(None, [])[0].name in ("cpu", "reference")


def test_on_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    backend, why = choose_backend(None, [LAYER])
    assert backend.name == "reference"
    assert "flash: there is no CUDA device; triton: " in why and "torch_varlen: there is no CUDA device" in why


# ------------------------------------------------------------------------------------------------------------- several


def mixed_heads() -> Any:
    """Gemma 2 whose layers with a window have other KV heads, so that they need storages of their own."""
    model = make_model("Gemma2")
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = 4
    for i, kind in enumerate(model.config.layer_types):
        if kind == "sliding_attention":
            model.model.layers[i].self_attn = type(model.model.layers[i].self_attn)(config, i)
    return model.eval()


@pytest.mark.usefixtures("three", "patched")
def test_each_kind_of_layer_has_its_backend() -> None:
    model, prompts = mixed_heads(), make_prompts([3, 9, 17, 30])
    want = [generate_alone(model, p, greedy()) for p in prompts]
    found = hf_cb.explain(model)
    assert (found.path, found.backend) == ("paged", "reference+nowindows")
    assert found.backend_reason is not None and "nowindows for 2 layers" in found.backend_reason
    assert "nowindows: it has no windows" in found.backend_reason
    NoWindows.calls = 0
    got = model.generate_batch(prompts, greedy(), EngineConfig(block_size=4, max_batch_tokens=16))
    assert [r.generated_tokens for r in got.values()] == want
    assert NoWindows.calls > 0
    with pytest.raises(OptionError, match="attention='nowindows'.*no windows"):
        model.generate_batch(prompts, greedy(), EngineConfig(attention="nowindows"))


@pytest.mark.usefixtures("three", "patched")
def test_blocks_are_copied_and_cleared_in_each_backend() -> None:
    model, prompts = mixed_heads(), make_prompts([20, 19, 18, 17])
    want = [generate_alone(model, p, greedy(20)) for p in prompts]
    config = EngineConfig(block_size=4, num_blocks=40, max_batch_tokens=24)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        assert isinstance(manager.engine.runner.backend, SeveralBackends)
        with manager.pause():
            handles = [manager.submit(p, greedy(20)) for p in prompts]
        results = [h.result() for h in handles]
    assert [r.generated_tokens for r in results] == want
    assert sum(r.metrics.preemptions for r in results) > 0, "the cache was meant to be too small"
    sampled = greedy(do_sample=True, top_k=1, num_return_sequences=3)
    forks = model.generate_batch([prompts[0]], sampled, EngineConfig(block_size=4))
    assert [r.generated_tokens for r in forks.values()] == [want[0][:12]] * 3
    assert [r.metrics.cached_tokens for r in forks.values()] == [0, 19, 19]


def test_several_are_one_backend() -> None:
    other = dataclasses.replace(LAYER, device=CPU, num_kv_heads=4)
    alone = dataclasses.replace(other, head_dim=32)
    backend = SeveralBackends({LAYER.kv_shape: Fast(), other.kv_shape: NoWindows()})
    assert backend.block_multiple == 12 and backend.usual_block_size == 36
    assert backend.missing() is None and backend.unsupported(other) is None
    assert backend.unsupported(dataclasses.replace(other, window=8)) == "it has no windows"
    assert "no backend was chosen" in str(backend.unsupported(alone))
    storage = backend.allocate(other, 4, 12)
    storage.own.k[1:] = 1.0
    backend.clear_blocks(storage, torch.tensor([2]))
    backend.copy_blocks(storage, torch.tensor([(2, 3)]))
    assert [int(block.sum()) for block in storage.own.k[:, 0, :, 0]] == [0, 12, 0, 0]
    assert backend.block_bytes(other, 12) == NoWindows().block_bytes(other, 12)
    batch = build(StepPlan([part([0, 0], 1, 1, [[1]])]), 1, 12)
    assert backend.graph_key(batch) == (2, 1)
    assert SeveralBackends({LAYER.kv_shape: Fast(), other.kv_shape: ReferenceBackend()}).graph_key(batch) is None


# --------------------------------------------------------------------------------------------------------------- trial


class Plain(PagesBackend):
    """Right, or wrong in one way."""

    name = "plain"

    def __init__(self, **wrong: Any) -> None:
        self.wrong = wrong

    def missing(self) -> None:
        return None

    def unsupported(self, layer: LayerFacts) -> str | None:
        return trial.failure(self, layer)

    def attend(
        self, storage: Storage, layer: LayerFacts, q: Tensor, k: Tensor, v: Tensor, meta: Meta, sinks: Tensor | None
    ) -> Tensor:
        if "raises" in self.wrong or storage.k.shape[1] == self.wrong.get("page"):
            raise RuntimeError("no kernel image is available\nand more")
        store(storage, k, v, meta.slot_mapping)
        layer = dataclasses.replace(layer, **self.wrong.get("layer", {}))
        left = None if layer.window is None else layer.window - 1
        lengths = meta.seq_lens + self.wrong.get("longer", 0)
        keys = storage.k.roll(self.wrong.get("shift", 0), 1)
        bounds = (layer.scale, left, 0, layer.softcap or 0.0)
        return attend(q, keys, storage.v, meta.cu_seqlens_q, lengths, meta.block_table, *bounds)


def measure(backend: Plain, layer: LayerFacts) -> str | None:
    return trial._measure(backend, trial._like(layer), layer.dtype, backend.usual_block_size)


def test_a_trial_has_the_block_size_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_known", {})
    monkeypatch.setattr(registry, "backends", lambda: {"plain": lambda: Plain(page=16)})
    layer = dataclasses.replace(LAYER, device=CPU)
    assert [choose_backend("plain", [layer], block_size=size)[0].name for size in (None, 32, 8)] == ["plain"] * 3
    with pytest.raises(OptionError, match=r"no kernel image is available \(with blocks of 16 tokens\)"):
        choose_backend("plain", [layer], block_size=16)


@pytest.mark.parametrize("kind", [{}, {"window": 4096}, {"softcap": 50.0}])
def test_a_trial_finds_nothing_wrong_with_what_is_right(kind: dict) -> None:
    layer = dataclasses.replace(LAYER, device=CPU, **kind)
    assert measure(Plain(), layer) is None


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ({"window": 4096}, {"layer": {"window": None}}),
        ({"window": 4096}, {"layer": {"window": 4}}),
        ({"softcap": 50.0}, {"layer": {"softcap": None}}),
        ({"chunk": 4096}, {}),
        ({}, {"layer": {"scale": 0.2}}),
        ({}, {"longer": -1}),
        ({}, {"longer": 1}),
        ({}, {"shift": 1}),
    ],
)
def test_a_trial_finds_what_is_wrong(kind: dict, wrong: dict) -> None:
    layer = dataclasses.replace(LAYER, device=CPU, **kind)
    assert str(measure(Plain(**wrong), layer)).startswith("a trial of it is off by")


def test_a_trial_that_raises_is_a_reason() -> None:
    found = measure(Plain(raises=True), dataclasses.replace(LAYER, device=CPU))
    assert found == "a trial of it ends with RuntimeError: no kernel image is available"


# -------------------------------------------------------------------------------------------------------------- doctor


def test_doctor_says_which_backends_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)["attention"]
    assert list(found["problems"]) == list(registry.backends()) and found["problems"] == survey(CPU)
    assert found["problems"]["reference"] is None and found["chosen"] in ("cpu", "reference")
    assert main(["doctor", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"attention: {found['chosen']} is chosen for bfloat16 heads of 128" in said
    for name, problem in found["problems"].items():
        assert f"  {name}: {problem or 'available'}\n" in said
