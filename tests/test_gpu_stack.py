"""Fused decoder layers on the Triton kernels: generate's tokens, and what makes them step aside."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fused_models import DEVICE, PROMPTS, Again, Harness, alone, assert_same, bits, is_merged, make, storage_bytes
from torch import Tensor, nn

from hf_cb.core import Request, SamplingParams
from hf_cb.models.recorded.captured import ladder
from hf_cb.modules import merged
from hf_cb.modules.gpu_decoder import GpuDecoder
from hf_cb.warpers import Warpers

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.usefixtures("intercepted")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each fused step."""
    seen: list[int] = []
    logits = GpuDecoder.logits

    def noting(self: GpuDecoder, batch: Any, caches: Any) -> Tensor:
        seen.append(len(batch.input_ids))
        return logits(self, batch, caches)

    monkeypatch.setattr(GpuDecoder, "logits", noting)
    return seen


# ------------------------------------------------------------------------------------------------------- same tokens


MIXED = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
RECOGNISED: dict[str, dict[str, Any]] = {
    "Llama": dict(attention_bias=True),
    "Qwen3": {},  # query and key norms
    "Gemma2": dict(num_hidden_layers=2, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),  # norms after
    "Gemma3": MIXED,  # two kinds of angles
    "Phi3": {},  # projections that are merged already
    "Mistral": {},
    "Granite": {},  # multipliers
    "Olmo2": {},  # norms after alone, and of whole rows of queries
    "SmolLM3": dict(num_hidden_layers=2),  # a layer without rotation
    "Helium": {},  # neighbours turn together
    "Arcee": {},  # no gate
}


@pytest.mark.parametrize("family", RECOGNISED)
def test_tokens(family: str, steps: list[int]) -> None:
    model = make(family, **RECOGNISED[family])
    if family.startswith("Gemma"):
        for name, parameter in model.named_parameters():
            parameter.data += 0.2 * torch.randn_like(parameter) if name.endswith("norm.weight") else 0
    want = alone(model)
    harness = Harness(model, max_batch_tokens=8)
    steps.clear()
    assert harness.tokens() == want
    assert max(steps) > 2 and len(steps) >= 4


@pytest.mark.parametrize(
    ("family", "why"), [("Starcoder2", "norms with means or biases"), ("Phi", "MLP beside"), ("Olmo", "off by")]
)
def test_other_layers_are_left_alone(family: str, why: str, steps: list[int], caplog: Any) -> None:
    model = make(family)
    caplog.set_level(logging.INFO, "hf_cb")
    before, want = storage_bytes(model), alone(model, 2)
    harness = Harness(model)
    assert why in harness.runner._fused.why_not and why in caplog.text
    assert harness.tokens(2) == want and not steps and storage_bytes(model) == before


def test_other_backends_and_hooks_are_refused(caplog: Any) -> None:
    model = make()
    caplog.set_level(logging.INFO, "hf_cb")
    assert "the reference backend" in Harness(model, attention="reference").runner._fused.why_not
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    assert "a hook is set" in Harness(model).runner._fused.why_not
    handle.remove()
    assert Harness(model).runner._fused.decoder is not None, "those reasons pass"
    assert caplog.text.count("keeps its own layers") == 2


def test_half_precision_rounds_where_the_modules_do() -> None:
    model = make("Gemma2").half()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 0
    recipe = Harness(model).runner._fused.decoder.recipe
    assert recipe.final_norm.rounds_once and recipe.final_norm.plus_one
    assert not Harness(make().half()).runner._fused.decoder.recipe.final_norm.rounds_once


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    model, logits = make(), GpuDecoder.logits
    before = bits(model)
    monkeypatch.setattr(GpuDecoder, "logits", lambda *given: logits(*given) + 1)
    harness = Harness(model)
    assert "the logits of the whole are off" in harness.runner._fused.why_not
    assert harness.tokens(2) == alone(model, 2)
    assert_same(model.state_dict(), before)


# ------------------------------------------------------------------------------------------------------- stepping aside


@pytest.mark.parametrize("what", ["hook", "module", "class", "moved"])
def test_what_is_in_the_way(what: str, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    harness = Harness(model, captured=what == "moved")
    mlp, handle = model.model.layers[0].mlp, None
    plain = harness.tokens(2)
    if what == "hook":
        handle = mlp.register_forward_hook(lambda m, args, out: out * 0)
    elif what == "module":
        mlp.up_proj = nn.Linear(64, 96, bias=False, device=DEVICE)
    elif what == "class":
        forward = type(mlp).forward
        monkeypatch.setattr(type(mlp), "forward", lambda self, x: forward(self, x) * 0.5)
    else:  # between two steps, when no request comes
        monkeypatch.setattr(harness.runner, "new_requests", lambda: None)
        mlp.up_proj.weight.data = mlp.up_proj.weight.data * -1
    steps.clear()
    replays = sum(capture.replays for capture in harness.captures if isinstance(capture, Again))
    assert harness.tokens(2) == alone(model, 2)
    assert not steps
    assert replays == sum(capture.replays for capture in harness.captures if isinstance(capture, Again))
    if handle is not None:
        handle.remove()
        assert harness.tokens(2) == plain and steps
    if what == "moved":
        monkeypatch.undo()
        assert harness.tokens(2) == alone(model, 2)
        assert is_merged(model), "again, for the next request"


def test_captured_steps_are_fused_and_never_wait(steps: list[int]) -> None:
    harness = Harness(make("Mistral"), captured=True, overlap=True)
    want = alone(harness.model, 6)
    assert harness.tokens(6) == want and harness.runner.why_not is None
    assert len(harness.captures) == len(ladder(2))
    assert set(steps) >= {1, 2}
    harness.model.model.layers[0].self_attn.q_proj.weight.data *= 1.0  # in place: what was recorded reads it
    assert harness.tokens(6) == want and len(harness.captures) == len(ladder(2))
    model, weight = harness.model, harness.model.model.layers[0].self_attn.q_proj.weight
    old = weight.data  # kept, so that no other takes its place
    weight.data = -old
    assert harness.tokens(6) == alone(model, 6) != want
    assert len(harness.captures) == 2 * len(ladder(2)), "recorded anew"


@pytest.mark.parametrize("options", [dict(top_k=5), dict(top_p=0.9, temperature=1.3), dict(min_p=0.1)])
def test_what_a_captured_step_draws(options: dict[str, Any]) -> None:
    model, found = make(), []
    for captured in (True, False):
        harness = Harness(model, captured=captured, overlap=captured)
        params = SamplingParams(5, do_sample=True, seed=3, warpers=Warpers(**options), logprobs=True)
        requests = [Request("drawn", PROMPTS[0], params), Request("greedy", PROMPTS[1], SamplingParams(5))]
        harness.run(requests)
        assert captured == any(capture.replays for capture in harness.captures)
        found.append(requests)
    for drawn, behind in zip(*found, strict=True):
        assert drawn.output_ids == behind.output_ids and drawn.logprobs == pytest.approx(behind.logprobs, abs=1e-4)
    assert len(found[0][0].logprobs) == 5


def test_no_memory_for_merging(monkeypatch: pytest.MonkeyPatch, caplog: Any, steps: list[int]) -> None:
    model, moved = make(num_hidden_layers=2), merged._moved

    def failing(parameters: Any) -> Tensor:
        if parameters[0] is model.model.layers[1].self_attn.q_proj.weight:
            raise torch.OutOfMemoryError("none left")
        return moved(parameters)

    before, want = bits(model), alone(model, 2)
    caplog.set_level(logging.INFO, "hf_cb")
    with monkeypatch.context() as patch:
        patch.setattr(merged, "_moved", failing)
        harness = Harness(model)
        steps.clear()
        assert harness.tokens(2) == want and not steps
    assert not harness.runner._fused.merged and "no memory" in caplog.text
    assert_same(model.state_dict(), before)
    assert harness.tokens(2) == want and steps and harness.runner._fused.merged
