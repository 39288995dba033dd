"""`kv_dtype="fp8"`: a cache of half the size on the Triton backend, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fused_models import DEVICE, Harness
from recorded import TensorBackend
from running import run_all
from tiny_models import greedy, make_model, make_prompts

import hf_cb
from hf_cb import EngineConfig, OptionError
from hf_cb.attention.triton import TritonBackend
from hf_cb.core import Request, SamplingParams
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.engine import Engine
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import plan_paged

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.usefixtures("intercepted")
PROMPTS = make_prompts([11, 3, 11])


class Rounding(TensorBackend):
    """Keeps what e4m3 has room for, as PyTorch rounds it."""

    def attend(self, storage: Any, layer: Any, q: Any, k: Any, v: Any, meta: Any, sinks: Any) -> torch.Tensor:
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return super().attend(storage, layer, q, k, v, meta, sinks)


def run(model: Any, backend: Any, host_blocks: int = 0, num_blocks: int = 60) -> list[Request]:
    """Three requests, of which one is a fork of another; few blocks make them give way to each other."""
    options = dict(attention="triton", kv_dtype="fp8", block_size=4, num_blocks=num_blocks, max_batch_tokens=9)
    plan = plan_paged(model, EngineConfig(**options, prefix_caching=False))
    config = dataclasses.replace(plan.config, host_blocks=host_blocks)
    sizes = (config.num_blocks, config.block_size, host_blocks)
    runner = PagedModel(model, plan.trace, plan.groups, backend or plan.backend, *sizes)
    engine = Engine(runner, config, sampler=DeviceSampler())
    first = Request("first", PROMPTS[0], SamplingParams(6, logprobs=True))
    fork = Request("fork", PROMPTS[0], SamplingParams(6, logprobs=True), fork_of=first)
    requests = [first, fork, Request("other", PROMPTS[1], SamplingParams(6, logprobs=True))]
    run_all(engine, requests)
    return requests


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_answers_are_those_of_rounded_keys_and_values(family: str) -> None:
    model = make_model(family, num_hidden_layers=2).to(DEVICE)
    got, want = run(model, None), run(model.cpu(), Rounding())
    assert [r.output_ids for r in got] == [r.output_ids for r in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-2)
    with torch.no_grad():
        alone = model(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
    off = abs(float(alone[got[0].output_ids[0]]) - got[0].logprobs[0])
    assert 1e-5 < off < 0.5, "nearly those of the full cache"


def test_blocks_are_copied_and_go_to_the_host_and_back() -> None:
    model = make_model("Llama", num_hidden_layers=1).to(DEVICE)
    want = run(model, None)
    got = run(model, None, host_blocks=20, num_blocks=7)
    assert sum(r.metrics.preemptions for r in got) > 0 and got[1].metrics.cached_tokens > 0
    assert [r.output_ids for r in got] == [r.output_ids for r in want]


@pytest.mark.parametrize("captured", [False, True])
def test_fused_steps_keep_fp8_too(captured: bool) -> None:
    """Layers are recognised on a full cache: a key may round to the other of two neighbours."""
    model = make_model("Qwen3", num_hidden_layers=1).to(DEVICE)
    fused = Harness(model, captured, kv_dtype="fp8")
    assert fused.runner._fused.decoder is not None, fused.runner._fused.why_not
    tokens = fused.tokens()
    kept = [t for storage in fused.runner.storages for t in storage]
    assert {t.dtype for t in kept} == {torch.float8_e4m3fn} and all(t.float().abs().sum() > 0 for t in kept)
    plan = plan_paged(model, EngineConfig(attention="triton", kv_dtype="fp8", block_size=4, num_blocks=40))
    runner = PagedModel(model, plan.trace, plan.groups, plan.backend, 40, 4)
    own = Harness(model, kv_dtype="fp8")
    own.engine.runner = runner
    assert tokens == own.tokens()


def test_a_budget_holds_twice_as_many_tokens() -> None:
    model = make_model("Llama").half().to(DEVICE)
    options = [dict(attention="triton"), dict(kv_dtype="fp8")]
    full, half = (plan_paged(model, EngineConfig(kv_budget="4MiB", **o)).config.num_blocks for o in options)
    assert half == 2 * full


@pytest.mark.usefixtures("patched")
def test_where_it_cannot_be_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama")
    for name in ("flash", "cpu", "reference"):
        with pytest.raises(OptionError, match=f"kv_dtype='fp8' needs attention='triton', not '{name}'"):
            model.generate_batch([[5]], greedy(1), EngineConfig(kv_dtype="fp8", attention=name))
    monkeypatch.setattr(TritonBackend, "unsupported", lambda self, layer: "it computes elsewhere")
    with pytest.raises(OptionError, match="needs the triton backend, which cannot run this model: it computes elsewh"):
        model.generate_batch([[5]], greedy(1), EngineConfig(kv_dtype="fp8"))


def test_explain_says_so(shared_llama: Any) -> None:
    hf_cb.patch(kv_dtype="fp8")
    try:
        found = hf_cb.explain(shared_llama.to(DEVICE))
    finally:
        hf_cb.unpatch()
    assert found.backend == "triton" and "fp8" in str(found.backend_reason)
    assert "MiB of fp8" in found.config["kv_cache"]
