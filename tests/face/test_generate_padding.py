"""Padded rows on other architectures: by the engine where padding changes nothing, else by the original loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from routed import PROMPTS, padded, same
from tiny_models import make_model
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_cb
from hf_cb.bench import sweep

GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=10, eos_token_id=None, pad_token_id=0)
OTHERWISE = "this model answers otherwise with padding than without"


def answers(make: Any, inputs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Of a plain model, and of an accelerated one, both fresh."""
    want = make().generate(**inputs, **GREEDY | options)
    ours = hf_cb.accelerate(make(), modules="off")
    got = ours.generate(**inputs, **GREEDY | options)
    hf_cb.restore(ours)
    return got, want


@pytest.mark.parametrize("family", ["Mistral", "Gemma3", "GPTNeoX", "Phi3"])
def test_windows_and_other_heads(ways, family: str) -> None:
    assert same(*answers(lambda: make_model(family), padded())) and ways.take() == []


@pytest.mark.parametrize(
    ("name", "reasons"),
    [("gpt2", []), ("bloom", []), ("mamba", []), ("lfm2", []), ("rwkv", [OTHERWISE]), ("roformer", [OTHERWISE])],
)
def test_every_kind_of_position_and_state(ways, name: str, reasons: list[str]) -> None:
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name)
    if class_name is None:
        pytest.skip(f"this transformers has no {name}")
    assert same(*answers(lambda: sweep.build_tiny(name, class_name, 0), padded())) and ways.take() == reasons


def test_a_rotary_scaling_that_looks_at_the_longest_row(ways) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}

    def make() -> Any:
        return make_model(rope_parameters=dict(rope), max_position_embeddings=24)

    assert same(*answers(make, padded())) and ways.take() == []  # 12 + 10 tokens: not scaled yet
    assert same(*answers(make, padded(), max_new_tokens=20))
    assert ways.take() == ["the longest row scales the rotary embeddings of all"]
    even = {"input_ids": torch.tensor([PROMPTS[1], PROMPTS[1][::-1]])}
    assert same(*answers(make, even, max_new_tokens=20)) and ways.take() == []
