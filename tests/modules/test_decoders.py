"""Which decoders are recognised, that they give generate's tokens, and what makes them step aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, generate_alone, greedy, make_model, make_prompts

import hf_cb
from hf_cb.kernels.cpu import library as lib
from hf_cb.models.fused.stack import StackModel
from hf_cb.modules.weights import is_packed

pytestmark = pytest.mark.skipif(lib.library() is None, reason=f"no compiled kernels: {lib.problem()}")
OWN_LAYERS = {"Olmo", "GPTNeoX"}  # a norm without a weight; queries, keys and values interleaved head by head
PROMPTS = make_prompts([30, 5, 17, 60])


def native_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Notes for each step whether it was the native call."""
    seen: list[bool] = []
    ready = StackModel._ready

    def noting(self: StackModel) -> Any:
        found = ready(self)
        if self._known is not None:  # else it is still being read
            seen.append(found is not None)
        return found

    monkeypatch.setattr(StackModel, "_ready", noting)
    hf_cb.accelerate(model)
    return seen


def tokens(model: Any, **options: Any) -> list[list[int]]:
    return [r.generated_tokens for r in model.generate_batch(PROMPTS, greedy(12), **options).values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family)
    want = [generate_alone(model, p, greedy(12)) for p in PROMPTS]
    seen = native_steps(model, monkeypatch)
    for options in ({}, dict(block_size=4, max_batch_tokens=7), dict(block_size=16, num_blocks=60)):
        assert tokens(model, continuous_batching_config=hf_cb.EngineConfig(**options)) == want
    assert seen and all(native is (family not in OWN_LAYERS) for native in seen)
    hf_cb.restore(model)


@pytest.mark.parametrize("change", ["biases", "no gate", "head of 7", "unequal head sizes"])
def test_other_shapes(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {
        "biases": lambda: make_model("Llama", attention_bias=True, mlp_bias=True),
        "no gate": lambda: make_model("Arcee"),
        "head of 7": lambda: make_model("Mistral", head_dim=7 * 2, sliding_window=None, hidden_size=40),
        "unequal head sizes": lambda: make_model("Qwen3", head_dim=24, num_key_value_heads=1),
    }[change]()
    want = [generate_alone(model, p, greedy(12)) for p in PROMPTS]
    seen = native_steps(model, monkeypatch)
    assert tokens(model) == want
    assert all(seen)
    hf_cb.restore(model)


def test_hooks_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama")
    want = [generate_alone(model, p, greedy(12)) for p in PROMPTS]
    seen = native_steps(model, monkeypatch)
    calls: list[int] = []
    hook = model.model.layers[1].register_forward_hook(lambda m, args, out: calls.append(1))
    assert tokens(model) == want and calls and not any(seen)
    hook.remove()
    seen.clear()
    calls.clear()
    assert tokens(model) == want and not calls and all(seen)
    hf_cb.restore(model)


def test_a_hook_that_changes_something_is_obeyed() -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model)
    plain = tokens(model)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda m, args, out: out * 0)
    want = [generate_alone(model, p, greedy(12)) for p in PROMPTS]
    assert tokens(model) == want != plain
    hook.remove()
    assert tokens(model) == plain
    hf_cb.restore(model)


def test_a_module_that_is_replaced_is_used() -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model)
    tokens(model)
    torch.manual_seed(3)
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 96, bias=False)
    want = [generate_alone(model, p, greedy(12)) for p in PROMPTS]
    assert tokens(model) == want
    hf_cb.restore(model)


@pytest.mark.parametrize("family", ["GPTNeoX", "Olmo", "Llama"])
def test_linear_layers_alone(family: str) -> None:
    model = make_model(family)
    want = [generate_alone(model, p, greedy(12)) for p in PROMPTS]
    hf_cb.accelerate(model, modules="leaf")
    assert tokens(model) == want
    assert is_packed(model.get_output_embeddings().weight)
    assert [generate_alone(model, p, greedy(12)) for p in PROMPTS] == want
    assert is_packed(model.get_output_embeddings().weight)  # generate ran on the packed weights too
    hf_cb.restore(model)


def test_a_weight_that_is_read_in_other_ways_stays() -> None:
    model = make_model("GPTNeoX")
    dense = model.gpt_neox.layers[1].mlp.dense_h_to_4h
    forward = type(model.gpt_neox.layers[1].mlp).forward

    def reading(x: torch.Tensor) -> torch.Tensor:
        return forward(model.gpt_neox.layers[1].mlp, x) + dense.weight.sum() * 0

    model.gpt_neox.layers[1].mlp.forward = reading
    want = [generate_alone(model, p, greedy(12)) for p in PROMPTS]
    hf_cb.accelerate(model)
    assert tokens(model) == want
    assert not is_packed(dense.weight)
    assert is_packed(model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight)
    hf_cb.restore(model)


def test_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama")
    seen = native_steps(model, monkeypatch)
    hf_cb.accelerate(model, modules="off")
    tokens(model)
    assert not seen
    hf_cb.restore(model)


def test_longer_than_the_first_rotary_table() -> None:
    model = make_model("Llama", max_position_embeddings=4096)
    prompts = [make_prompts([2100])[0], make_prompts([5])[0]]
    want = [generate_alone(model, p, greedy(4)) for p in prompts]
    hf_cb.accelerate(model)
    assert [r.generated_tokens for r in model.generate_batch(prompts, greedy(4)).values()] == want
    hf_cb.restore(model)
