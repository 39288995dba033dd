"""The `triton` backend: in the engine, in captured steps, and where it cannot be used.

On a GPU where there is one, and else in Triton's interpreter, with few tokens.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
import transformers
from test_paths import ARCHITECTURES
from tiny_models import SHAPE, generate_alone, greedy, make_model, make_prompts

import hf_cb
from hf_cb import EngineConfig
from hf_cb.attention import triton as module
from hf_cb.attention.choice import choose_backend
from hf_cb.attention.pages import Storage
from hf_cb.attention.trial import small_step
from hf_cb.attention.triton import TritonBackend
from hf_cb.models.twin import spread_weights
from hf_cb.steps import NULL_BLOCK, LayerFacts, StepBatch

triton = pytest.importorskip("triton", reason="triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYER = LayerFacts(4, 2, 16, 16, scale=0.25, dtype=torch.float32, device=DEVICE)
TABLES = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]

# plain, a window, sinks, a soft-cap that matters, chunks, values that are not as wide as keys
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "GptOss": {},
    "Gemma2": dict(attn_logit_softcapping=2.0),
    "Llama4": {},
    "DeepseekV3": {},
}


def make(family: str) -> transformers.PreTrainedModel:
    changes = dict(num_hidden_layers=2) | FAMILIES[family]
    if family not in ARCHITECTURES:
        return make_model(family, **changes).to(DEVICE)
    options = SHAPE | ARCHITECTURES[family][1] | changes
    config = getattr(transformers, options.pop("_config", f"{family}Config"))(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    return spread_weights(model).to(DEVICE)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_generate(family: str) -> None:
    model, prompts = make(family), make_prompts([1, 7, 13])
    if family == "Gemma2":
        model.set_attn_implementation("eager")  # older transformers drop a soft-cap with sdpa
    want = [generate_alone(model, p, greedy(4)) for p in prompts]
    config = EngineConfig(attention="triton", block_size=4, max_batch_tokens=9)
    got = model.generate_batch(prompts, greedy(4), config)
    assert [r.error for r in got.values()] == [None] * len(prompts)
    assert [r.generated_tokens for r in got.values()] == want
    hf_cb.accelerate(model, attention="triton")
    found = hf_cb.explain(model)
    hf_cb.restore(model)
    assert (found.path, found.backend, found.backend_reason) == ("paged", "triton", "asked for")


@pytest.mark.usefixtures("patched")
def test_copied_blocks_and_reused_ones() -> None:
    model, prompt = make("Llama"), make_prompts([10])[0]
    want = generate_alone(model, prompt, greedy(4))
    sampled = greedy(4, do_sample=True, top_k=1, num_return_sequences=2)
    config = EngineConfig(attention="triton", block_size=4, num_blocks=9)
    results = model.generate_batch([prompt], sampled, config)
    assert [r.generated_tokens for r in results.values()] == [want] * 2
    assert [r.metrics.cached_tokens for r in results.values()] == [0, 9]


# ------------------------------------------------------------------------------------------------------ captured steps


def decodes(lengths: list[int], tables: list[list[int]] = TABLES, page: int = 16) -> StepBatch:
    batch = small_step([1] * len(lengths), lengths, tables, page, DEVICE)
    batch.seq_lens_list = None  # nobody may look at it
    return batch


def tokens(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, heads, 16, generator=generator).to(DEVICE) for heads in (4, 2, 2)]


def filled(backend: TritonBackend, page: int = 16) -> Storage:
    storage = backend.allocate(LAYER, 10, page)
    for cache in storage:
        cache[1:] = torch.randn(cache[1:].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return storage


def attend(backend: TritonBackend, storage: Storage, batch: StepBatch, *qkv: torch.Tensor) -> torch.Tensor:
    return backend.attend(storage, LAYER, *qkv, backend.prepare(batch, batch.groups[0], DEVICE), None)


def shape_of(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU's launches are captured in the next test")
@pytest.mark.parametrize(("page", "kernels"), [(16, 2), (128, 3)], ids=["one program a tile", "keys in pieces"])
def test_decodes_of_any_lengths_are_the_same_launches(page: int, kernels: int, monkeypatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    launches: list[Any] = []
    launch = GridExecutor.__call__

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [shape_of(value) for value in args], {name: shape_of(value) for name, value in kwargs.items()}
        launches.append((self.fn.__name__, self.grid, *given))
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", noting)
    backend = TritonBackend()
    storage, seen, keys = filled(backend, page), [], []
    for lengths in ([1, 1, 1], [3 * page, 2, page + 1]):
        batch = decodes(lengths, page=page)
        attend(backend, storage, batch, *tokens(3))
        seen.append(launches.copy())
        keys.append(backend.graph_key(batch))
        launches.clear()
    assert len(seen[0]) == kernels and seen[0] == seen[1]
    assert keys[0] == keys[1] is not None
    chunk = small_step([1, 5, 1], [4, 9, 3], TABLES, 16, DEVICE)
    assert backend.graph_key(chunk) != keys[0], "a chunk may be computed in other tiles"


@pytest.mark.gpu
def test_a_captured_step_is_replayed_with_other_lengths() -> None:
    backend = TritonBackend()
    storage, batch, qkv = filled(backend), decodes([1, 1, 1]), tokens(3)
    attend(backend, storage, batch, *qkv)  # compiled outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(backend, storage, batch, *qkv)
    for lengths in ([48, 2, 17], [3, 33, 16]):
        other, new = decodes(lengths), tokens(3, seed=lengths[0])
        want = attend(backend, filled(backend), other, *new)
        for mine, fresh in zip(storage, filled(backend), strict=True):
            mine.copy_(fresh)
        for mine, theirs in zip(qkv, new, strict=True):
            mine.copy_(theirs)
        batch.seq_lens.copy_(other.seq_lens)
        batch.groups[0].slot_mapping.copy_(other.groups[0].slot_mapping)
        graph.replay()
        torch.testing.assert_close(out, want)


def test_rows_of_padding_change_nothing() -> None:
    backend = TritonBackend()
    alone, padded = filled(backend), filled(backend)
    (q, k, v), own = tokens(3), decodes([20], TABLES[:1])
    want = attend(backend, alone, own, q[:1], k[:1], v[:1])
    batch = decodes([20, 1, 1], [TABLES[0], [NULL_BLOCK] * 3, [NULL_BLOCK] * 3])
    batch.groups[0].slot_mapping[1:] = -1
    out = attend(backend, padded, batch, q, k, v)
    torch.testing.assert_close(out[:1], want)
    assert out[1:].eq(0).all()
    assert all(torch.equal(a, b) for a, b in zip(alone, padded, strict=True))


def test_rows_need_not_be_contiguous() -> None:
    backend, qkv = TritonBackend(), tokens(3)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    assert strided[0].stride(-1) != 1
    want, got = (attend(backend, filled(backend), decodes([48, 2, 17]), *x) for x in (qkv, strided))
    assert torch.equal(want, got)


# ------------------------------------------------------------------------------------------------- where it is not used


def test_it_is_never_chosen_for_a_cpu() -> None:
    assert choose_backend(None, [dataclasses.replace(LAYER, device=torch.device("cpu"))])[0].name != "triton"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (dict(head_dim=512), "a head of 512 is larger than 256"),
        (dict(v_head_dim=512), "a head of 512 is larger than 256"),
        (dict(dtype=torch.float64), "not torch.float64"),
        (dict(num_heads=5), "5 query heads"),
        (dict(scale=0.0), "a scale of 0.0"),
        (dict(device=torch.device("mps")), "it computes on mps"),
    ],
)
def test_what_it_lacks_is_named(change: dict, word: str) -> None:
    assert word in str(TritonBackend().unsupported(dataclasses.replace(LAYER, **change)))


def test_it_needs_triton_and_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TritonBackend().missing() is None
    with monkeypatch.context() as patch:
        patch.setattr(module, "interpreted", lambda: False)
        cpu = dataclasses.replace(LAYER, device=torch.device("cpu"))
        assert "TRITON_INTERPRET=1" in str(TritonBackend().unsupported(cpu))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert "there is no CUDA, ROCm or XPU device" in str(TritonBackend().missing())
    with monkeypatch.context() as patch:
        patch.setattr(triton, "__version__", "3.5.1")
        assert module.package_problem.__wrapped__() == 'triton 3.5.1 is older than 3.6 (pip install "hf-cb[gpu]")'
        patch.setattr(triton, "__version__", "3.10.0+git1")
        assert module.package_problem.__wrapped__() is None
        for instead in (None, types.ModuleType("triton")):  # the other is a folder of that name
            patch.setitem(sys.modules, "triton", instead)
            assert module.package_problem.__wrapped__() == 'triton is not installed (pip install "hf-cb[gpu]")'
