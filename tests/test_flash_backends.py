"""What `flash` and `torch_varlen` hand over to FlashAttention is checked against stand-ins with its real signatures."""

from __future__ import annotations

import dataclasses
import inspect
import random
import sys
import types
from typing import Any

import flash_stand_ins as stand_ins
import pytest
import torch
from handmade import part, plain_attention

from hf_cb.attention import flash, torch_varlen
from hf_cb.attention.flash import GENERATIONS, Flash, FlashBackend, Generation
from hf_cb.attention.torch_varlen import TorchVarlenBackend
from hf_cb.engine.batch import build
from hf_cb.steps import LayerFacts, StepPlan

CPU = torch.device("cpu")
GENERATION = {generation.number: generation for generation in GENERATIONS}
FUNCTIONS = {2: stand_ins.flash_attn_2, 3: stand_ins.flash_attn_3, 4: stand_ins.flash_attn_4}
PAGES = {2: 256, 3: 3, 4: 16}
GPU = torch.device("cuda")
LAYER = LayerFacts(4, 2, 64, 64, scale=0.125, dtype=torch.bfloat16, device=GPU)


def flash_backend(number: int, function: Any = None) -> FlashBackend:
    backend, function = FlashBackend(), function or FUNCTIONS[number]
    backend.flash = Flash(GENERATION[number], function, frozenset(inspect.signature(function).parameters))
    backend.sums_lengths, backend.clears = number == 2, GENERATION[number].clears
    return backend


def varlen_backend() -> TorchVarlenBackend:
    backend = TorchVarlenBackend()
    backend.varlen_attn = stand_ins.varlen_attn
    return backend


def run_traffic(backend: Any, layer: LayerFacts, page: int, lengths: list[int]) -> None:
    """Requests in random chunks, on blocks in which others left NaN, against plain attention."""
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    free = list(range(1, sum(-(-n // page) for n in lengths) + 1))
    rng.shuffle(free)
    storage = backend.allocate(layer, len(free) + 1, page)
    for cache in storage:
        cache[1:] = float("nan")
    backend.clear_blocks(storage, torch.tensor(free))
    tables = [[free.pop() for _ in range(-(-n // page))] for n in lengths]
    k, v = ([torch.randn(n, layer.num_kv_heads, layer.head_dim, generator=generator) for n in lengths] for _ in "kv")
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        turn = [(i, rng.choice([1, 1, 5, 290])) for i in range(len(lengths)) if done[i] < lengths[i]]
        turn = [(i, min(c, lengths[i] - done[i])) for i, c in turn]
        batch = build(StepPlan([part([0] * lengths[i], done[i], c, [tables[i]]) for i, c in turn]), 1, page)
        tokens = sum(c for _, c in turn)
        # heads first and then transposed, as they come from a model
        q = torch.randn(layer.num_heads, tokens, layer.head_dim, generator=generator).transpose(0, 1)
        new_k, new_v = (torch.cat([x[i][done[i] : done[i] + c] for i, c in turn]) for x in (k, v))
        meta = backend.prepare(batch, batch.groups[0], CPU)
        out = backend.attend(storage, layer, q, new_k, new_v, meta, None)
        at = 0
        for i, c in turn:
            end = done[i] + c
            want = plain_attention(layer, q[at : at + c], k[i][:end], v[i][:end], done[i], None)
            torch.testing.assert_close(out[at : at + c].double(), want, atol=2e-6, rtol=1e-5)
            done[i], at = end, at + c
    assert all(cache[0].eq(0).all() for cache in storage)


@pytest.mark.parametrize("heads", [(4, 4, 16, 16), (6, 2, 8, 8)])
@pytest.mark.parametrize("kind", [{}, {"window": 5}, {"window": 1}, {"softcap": 3.0}])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_flash(number: int, kind: dict, heads: tuple[int, int, int, int]) -> None:
    layer = LayerFacts(*heads, scale=0.3, dtype=torch.float32, device=CPU, **kind)
    backend = flash_backend(number)
    assert PAGES[number] % backend.flash.generation.block_multiple == 0
    run_traffic(backend, layer, PAGES[number], [1, 9, 258, 300])


@pytest.mark.parametrize("heads", [(4, 4, 16, 16), (6, 2, 8, 8)])
@pytest.mark.parametrize("kind", [{}, {"window": 5}])
def test_torch_varlen(kind: dict, heads: tuple[int, int, int, int]) -> None:
    layer = LayerFacts(*heads, scale=0.3, dtype=torch.float32, device=CPU, **kind)
    run_traffic(varlen_backend(), layer, 256, [1, 9, 258, 300])


@pytest.mark.parametrize("kind", [{}, {"window": 5}])
def test_the_installed_torch_takes_these_arguments(kind: dict) -> None:
    """Its own function, on tensors without memory: everything but the kernel."""
    real, problem = torch_varlen.installed()
    if real is None:
        pytest.skip(str(problem))
    assert list(inspect.signature(real).parameters) == list(inspect.signature(stand_ins.varlen_attn).parameters)
    meta_device = torch.device("meta")
    layer = LayerFacts(6, 2, 8, 8, scale=0.3, dtype=torch.float16, device=meta_device, **kind)
    backend = TorchVarlenBackend()
    storage = backend.allocate(layer, 3, 256)
    batch = build(StepPlan([part([0] * 9, 4, 3, [[1]]), part([0] * 9, 8, 1, [[2]])]), 1, 256)
    q, k, v = (torch.empty(4, heads, 8, dtype=torch.float16, device=meta_device) for heads in (6, 2, 2))
    out = backend.attend(storage, layer, q, k, v, backend.prepare(batch, batch.groups[0], meta_device), None)
    assert out.shape == (4, 6, 8)


def test_padding_is_written_nowhere() -> None:
    layer = LayerFacts(4, 2, 8, 8, scale=0.3, dtype=torch.float32, device=CPU)
    backend = flash_backend(3)
    storage = backend.allocate(layer, 3, 4)
    batch = build(StepPlan([part([0] * 9, 2, 1, [[1]]), part([0] * 9, 0, 1, [[0]])]), 1, 4)
    batch.groups[0].slot_mapping[1] = -1
    q, k, v = (torch.ones(2, heads, 8) for heads in (4, 2, 2))
    out = backend.attend(storage, layer, q, k, v, backend.prepare(batch, batch.groups[0], CPU), None)
    assert storage.k[1, 2].eq(1).all() and storage.k.sum() == 16 and storage.v.sum() == 16
    assert out[1].eq(0).all()


@pytest.mark.parametrize(("number", "left"), [(2, 1.0), (3, 0.0), (4, 0.0)])
def test_old_values_are_dropped_where_they_may_be_read(number: int, left: float) -> None:
    layer, backend = LayerFacts(4, 2, 8, 8, scale=0.3, dtype=torch.float32, device=CPU), flash_backend(number)
    storage = backend.allocate(layer, 4, 256)
    storage.v.fill_(1)
    backend.clear_blocks(storage, torch.tensor([1, 3]))
    assert storage.v[[1, 3]].eq(left).all() and storage.v[[0, 2]].eq(1).all()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (dict(has_sinks=True), "sinks"),
        (dict(chunk=64), "chunks"),
        (dict(v_head_dim=32), "not 32"),
        (dict(dtype=torch.float32), "float32"),
        (dict(head_dim=512, v_head_dim=512), "512 is larger than 256"),
        (dict(head_dim=20, v_head_dim=20), "multiple of 8"),
        (dict(num_heads=5), "5 query heads"),
        (dict(device=CPU), "cpu"),
    ],
)
def test_what_they_lack_is_named(change: dict, word: str) -> None:
    layer = dataclasses.replace(LAYER, **change)
    for backend in (flash_backend(2), varlen_backend()):
        assert word in str(backend.unsupported(layer))


def test_soft_caps_need_a_version_that_has_them() -> None:
    def old(q: Any, k: Any, v: Any, cu_seqlens_q: Any, block_table: Any) -> None: ...

    layer = dataclasses.replace(LAYER, softcap=30.0)
    assert flash_backend(2, old).unsupported(layer) == "flash_attn.flash_attn_varlen_func has no softcap: update it"
    assert varlen_backend().unsupported(layer) == "torch's varlen_attn has no softcap"


def install(monkeypatch: pytest.MonkeyPatch, number: int, function: Any) -> Generation:
    """As if that generation of FlashAttention was installed."""
    generation = GENERATION[number]
    for name in (generation.module.split(".")[0], generation.module):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    setattr(sys.modules[generation.module], generation.function, function)
    return generation


def test_the_installed_generation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert flash.find(GENERATIONS) == (None, 'flash-attn is not installed (pip install "hf-cb[flash]")')
    for number in (2, 4, 3):  # each comes before the one found until then
        install(monkeypatch, number, FUNCTIONS[number])
        found, problem = flash.find(GENERATIONS)
        assert found is not None and problem is None
        assert found.generation.number == number and found.function is FUNCTIONS[number]
        assert "softcap" in found.arguments
    # `flash_attn` is now only the folder that generation 4 lies in
    assert flash.find([GENERATION[2]]) == (None, 'flash-attn is not installed (pip install "hf-cb[flash]")')


def test_a_generation_that_is_too_old_or_broken_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any
    ) -> None: ...

    generation = install(monkeypatch, 2, old)
    assert flash.find([generation]) == (
        None,
        "flash_attn.flash_attn_varlen_func has no block_table, window_size: update it",
    )

    def broken(name: str) -> None:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(flash.importlib, "import_module", broken)
    assert "undefined symbol" in str(flash.find([generation])[1])


@pytest.mark.parametrize(
    ("capability", "numbers"), [((8, 0), [2]), ((9, 0), [3, 4, 2]), ((10, 0), [4, 2]), ((12, 0), [2])]
)
def test_generations_fit_the_device(capability: tuple[int, int], numbers: list[int], monkeypatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(flash, "find", lambda fitting: seen.extend(g.number for g in fitting))
    flash.installed.__wrapped__()
    assert seen == numbers
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert flash.installed.__wrapped__() == (None, "no version of it is made for compute capability 7.5")


def test_an_older_torch_is_told_by_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=None, window_size=None: query
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    function, problem = torch_varlen.installed.__wrapped__()
    assert function is None and str(problem).endswith("has no block_table, enable_gqa, seqused_k")
