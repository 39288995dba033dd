"""PEFT adapters, switched between and during calls: every request gets the answers of those that are active."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import generate_alone, greedy, make_model, make_prompts

from hf_cb import EngineConfig

peft = pytest.importorskip("peft", reason="peft is not installed")
from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402

pytestmark = pytest.mark.usefixtures("patched")
PROMPTS = make_prompts([5, 17, 30])


def make_lora(seed: int) -> Any:
    torch.manual_seed(seed)
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


@pytest.fixture
def model() -> Any:
    """With two adapters in its layers, as transformers and PEFT put them there."""
    model = make_model()
    peft.inject_adapter_in_model(make_lora(1), model, "one")
    peft.inject_adapter_in_model(make_lora(2), model, "two")
    return model.eval()


def switch(model: Any, adapter: str | None) -> None:
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(adapter is not None)
            if adapter is not None:
                module.set_adapter(adapter)


def answers(model: Any) -> list[list[int]]:
    return [generate_alone(model, p, greedy(8)) for p in PROMPTS]


def test_between_calls(model) -> None:
    """With a manager that stays, and remembers prefixes."""
    seen = []
    for adapter in ("one", "two", None, "one", None):
        switch(model, adapter)
        found = model.generate_batch(PROMPTS, greedy(8), EngineConfig(block_size=4), persistent_manager=True)
        seen.append([r.generated_tokens for r in found.values()])
        assert seen[-1] == answers(model), adapter
    assert seen[0] != seen[1] != seen[2] != seen[0]
    model.destroy_cached_continuous_batching_manager()


def test_during_a_session(model) -> None:
    config = EngineConfig(block_size=4)
    switch(model, "one")
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        first = [manager.submit(p, greedy(8)).result(10).generated_tokens for p in PROMPTS]
        with manager.pause():
            switch(model, "two")
        second = [manager.submit(p, greedy(8)).result(10).generated_tokens for p in PROMPTS]
        switch(model, "one")  # without a pause too, as nothing runs
        third = [manager.submit(p, greedy(8)).result(10).generated_tokens for p in PROMPTS]
    assert second == answers_with(model, "two") and first == third == answers_with(model, "one")


def answers_with(model: Any, adapter: str) -> list[list[int]]:
    switch(model, adapter)
    return answers(model)


def test_a_peft_model() -> None:
    """PEFT's own wrapper keeps its adapters in its layers alone."""
    wrapped = peft.get_peft_model(make_model(), make_lora(1), "one")
    wrapped.add_adapter("two", make_lora(2))
    wrapped.eval()
    base = wrapped.get_base_model()
    with wrapped.continuous_batching_context_manager(continuous_batching_config=EngineConfig(block_size=4)) as manager:
        for adapter in ("one", "two", "one"):
            wrapped.set_adapter(adapter)
            found = [manager.submit(p, greedy(8)).result(10).generated_tokens for p in PROMPTS]
            assert found == answers(base), adapter
        with wrapped.disable_adapter():
            found = [manager.submit(p, greedy(8)).result(10).generated_tokens for p in PROMPTS]
            assert found == answers(base)
