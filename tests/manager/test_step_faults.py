"""A forward that raises for one request of a batch, on real models: that request ends, all others get their answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import SHAPE, generate_alone, greedy, make_model, make_prompts

from hf_cb import EngineConfig

pytestmark = pytest.mark.usefixtures("patched")
POISON = 77


def recurrent() -> Any:
    torch.manual_seed(0)
    config = transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"] * 2)
    return transformers.Lfm2ForCausalLM(config).eval()


def dense() -> Any:
    torch.manual_seed(0)
    return transformers.BloomForCausalLM(transformers.BloomConfig(**SHAPE, n_layer=2, n_head=4)).eval()


MODELS = {"paged": make_model, "windows": lambda: make_model("Mistral"), "recurrent": recurrent, "dense": dense}


def prompts() -> list[list[int]]:
    return [[t for t in p if t != POISON] for p in make_prompts([9, 17, 5, 24, 12])]


class Fault:
    """In a layer in the middle, so that half of the step's keys and states are written."""

    def __init__(self, model: Any, error: Exception, tokens: int | None = None) -> None:
        self.ids = torch.zeros(1, 0)
        self.error, self.tokens = error, tokens
        model.get_input_embeddings().register_forward_pre_hook(lambda _, args: setattr(self, "ids", args[0]))
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        layers[1].register_forward_pre_hook(self.raise_it)

    def raise_it(self, *_: Any) -> None:
        if (self.ids == POISON).any() or (self.tokens is not None and self.ids.numel() > self.tokens):
            raise self.error


@pytest.mark.parametrize("kind", MODELS)
def test_one_request_is_poison(kind: str) -> None:
    model = MODELS[kind]()
    good = prompts()
    want = [generate_alone(model, p, greedy(8)) for p in good]
    Fault(model, ValueError("poison"))
    bad = good[1][:5] + [POISON] + good[1][5:]
    config = EngineConfig(block_size=4, max_batch_tokens=16)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            handles = [manager.submit(p, greedy(8)) for p in [*good[:2], bad, *good[2:]]]
        with pytest.raises(ValueError, match="poison"):
            handles.pop(2).result(timeout=60)
        results = [h.result(timeout=60) for h in handles]
        assert manager.submit(good[0], greedy(8)).result(timeout=60).generated_tokens == want[0]
    assert [r.generated_tokens for r in results] == want
    manager.engine.check_idle()


@pytest.mark.parametrize("kind", MODELS)
def test_out_of_memory_beyond_a_few_tokens(kind: str) -> None:
    model = MODELS[kind]()
    good = prompts()
    want = [generate_alone(model, p, greedy(8)) for p in good]
    config = EngineConfig(block_size=4, max_batch_tokens=32)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            longest = max(map(len, good)) if kind == "dense" else 6  # which computes a prompt at once
            Fault(model, torch.OutOfMemoryError("no"), tokens=longest)
            handles = [manager.submit(p, greedy(8)) for p in good]
        assert [h.result(timeout=60).generated_tokens for h in handles] == want


def test_a_model_that_raises_for_everybody_ends_the_manager() -> None:
    model = make_model()
    with model.continuous_batching_context_manager() as manager:
        with manager.pause():
            Fault(model, ArithmeticError("broken"), tokens=0)
            handles = [manager.submit(p, greedy(8)) for p in 5 * prompts()]
        for handle in handles:
            with pytest.raises(ArithmeticError):
                handle.result(timeout=10)
        manager.join(10)
        assert isinstance(manager.background_thread_status.fatal_error, ArithmeticError)
