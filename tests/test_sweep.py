"""25 architectures of the sweep (`make sweep` runs all), most of them in no other test: old and new, every path."""

from __future__ import annotations

import logging

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_cb import EngineConfig
from hf_cb.bench import sweep

CHOSEN = {
    **dict.fromkeys(
        ("gpt2", "opt", "gpt_bigcode", "olmoe", "phimoe", "biogpt", "persimmon", "nemotron", "glm4"), "paged"
    ),
    **dict.fromkeys(("exaone4", "deepseek_v2", "qwen3_moe", "granitemoe", "seed_oss", "apertus", "ctrl"), "paged"),
    **dict.fromkeys(("granitemoehybrid", "olmo_hybrid", "qwen3_5_text", "lfm2_moe"), "paged"),
    **dict.fromkeys(("falcon", "gpt_neo", "xglm"), "dense"),
    "rwkv": "single",
    "recurrent_gemma": "recompute",
}


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("name", CHOSEN)
def test_architecture(name: str) -> None:
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name)
    if classes is None:
        pytest.skip(f"this transformers has no {name}")
    class_name = classes if isinstance(classes, str) else classes[0]
    config = EngineConfig(block_size=4, max_batch_tokens=16)
    found = sweep.compare(name, class_name, sweep.prompts_up_to(24), config, seed=4)
    assert (found.result, found.path) == ("same", CHOSEN[name]), found
