"""Vision-language and audio checkpoints with text alone; what is not text is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import generate_alone, greedy, make_model, make_prompts, make_tokenizer
from transformers import BatchEncoding, ProcessorMixin

import hf_cb
from hf_cb import EngineConfig, OptionError
from hf_cb.errors import PromptError
from hf_cb.manager import probe
from hf_cb.models.twin import make_twin, shrink, spread_weights

pytestmark = pytest.mark.usefixtures("patched")
# rotary positions in three dimensions, windows, a prompt seen both ways (so never cut up), short convolutions
COMPOSITES = {
    "LlavaForConditionalGeneration": "paged",
    "Qwen2VLForConditionalGeneration": "paged",
    "Qwen2_5_VLForConditionalGeneration": "paged",
    "Gemma3ForConditionalGeneration": "paged",
    "Mistral3ForConditionalGeneration": "paged",
    "Idefics3ForConditionalGeneration": "paged",
    "MllamaForConditionalGeneration": "paged",
    "PaliGemmaForConditionalGeneration": "dense",
    "Lfm2VlForConditionalGeneration": "paged",
}


def full_size(cls: Any) -> Any:
    """The defaults of its config; rotary sections are as checkpoints have them."""
    config = cls.config_class()
    if cls.__name__.startswith("Qwen2"):
        config.text_config.rope_parameters |= {"mrope_section": [16, 24, 24]}
    return config


def make_composite(name: str) -> Any:
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls._from_config(shrink(full_size(cls)), dtype=torch.float32).eval()
    return spread_weights(model)


@pytest.mark.parametrize("name", COMPOSITES)
def test_text_alone(name: str) -> None:
    model = make_composite(name)
    prompts = make_prompts([1, 9, 24, 30])
    want = [generate_alone(model, p, greedy(10)) for p in prompts]
    narrow = EngineConfig(block_size=4, max_batch_tokens=8, num_blocks=80)
    for config in (narrow, EngineConfig()):
        assert [r.generated_tokens for r in model.generate_batch(prompts, greedy(10), config).values()] == want
    assert hf_cb.explain(model).path == COMPOSITES[name]


def test_a_prompt_seen_both_ways_after_preemption() -> None:
    """The prompt is computed at once again, and what was generated token by token: never as one prompt."""
    model = make_composite("PaliGemmaForConditionalGeneration")
    prompts = make_prompts([20, 19, 18, 17])
    want = [generate_alone(model, p, greedy(20)) for p in prompts]
    results = model.generate_batch(prompts, greedy(20), EngineConfig(block_size=4, num_blocks=20)).values()
    assert [r.generated_tokens for r in results] == want
    assert sum(r.metrics.preemptions for r in results) > 0


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"])
def test_a_large_one_has_a_twin(name: str) -> None:
    cls = getattr(transformers, name)
    with torch.device("meta"):
        large = cls(full_size(cls))
    twin = make_twin(large)
    assert twin is not None and sum(p.numel() for p in twin.parameters()) < 5e6
    assert probe._judge_twin(large).path == "paged"


def test_a_twin_that_does_not_run_is_no_obstacle(monkeypatch) -> None:
    """Its sizes may not fit together: the model itself tells then."""
    model = make_model()

    def broken(_: Any) -> Any:
        twin = make_model(seed=1)
        twin.lm_head = torch.nn.Linear(3, 3)
        return twin

    monkeypatch.setattr(probe, "SMALL", 0)
    monkeypatch.setattr(probe, "make_twin", broken)
    prompt = make_prompts([9])[0]
    assert model.generate_batch([prompt], greedy(4))["req_0"].generated_tokens == generate_alone(
        model, prompt, greedy(4)
    )


def test_a_model_that_needs_an_image_is_refused() -> None:
    model = make_composite("Blip2ForConditionalGeneration")
    assert hf_cb.explain(model).path == "refused"
    with pytest.raises(hf_cb.UnsupportedModelError, match="generate's own steps fail for Blip2.*pixel_values"):
        model.generate_batch(make_prompts([3]), greedy(2))


PIXELS = np.zeros((1, 3, 4, 4), dtype=np.float32)


def test_inputs_beside_text_are_refused_by_name() -> None:
    model = make_composite("LlavaForConditionalGeneration")
    with pytest.raises(OptionError, match="pixel_values=: hf_cb takes text only"):
        model.generate_batch([[3, 4]], greedy(2), pixel_values=PIXELS)
    encoding = BatchEncoding({"input_ids": [[3, 4]], "attention_mask": [[1, 1]], "pixel_values": PIXELS})
    with pytest.raises(PromptError, match="pixel_values: hf_cb takes text only"):
        model.generate_batch(encoding, greedy(2))
    with model.continuous_batching_context_manager() as manager:
        with pytest.raises(PromptError, match="pixel_values: hf_cb takes text only"):
            manager.submit({"input_ids": [3, 4], "pixel_values": PIXELS}, greedy(2))
        good = manager.submit([3, 4], greedy(2)).result(timeout=60)
    assert len(good.generated_tokens) == 2


@pytest.mark.parametrize("kind", ["image", "image_url", "video", "audio", "input_audio"])
def test_a_picture_in_a_chat_is_refused_by_name(kind: str) -> None:
    model = make_composite("LlavaForConditionalGeneration")
    chat = [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": kind, "url": "x.png"}]}]
    found = model.generate_batch([[3, 4], chat], greedy(2), tokenizer=make_tokenizer())
    assert f"type '{kind}'" in found["req_1"].error and found["req_0"].error is None


def test_what_a_processor_returns_for_text() -> None:
    model = make_composite("Qwen2VLForConditionalGeneration")
    ids = torch.tensor([make_prompts([5])[0]])
    encoding = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
    want = generate_alone(model, ids[0].tolist(), greedy(3))
    assert model.generate_batch(**encoding, generation_config=greedy(3))["req_0"].generated_tokens == want
    assert model.generate_batch(encoding, greedy(3))["req_0"].generated_tokens == want


def test_a_processor_in_the_tokenizers_place() -> None:
    class Processor(ProcessorMixin):
        def __init__(self) -> None:
            self.tokenizer = make_tokenizer()

    model = make_model()
    found = model.generate_batch(["the answer"], greedy(3), tokenizer=Processor())["req_0"]
    assert found.error is None and found.text is not None


def test_what_else_a_row_may_have() -> None:
    """Rows of a table, encodings of odd tokenizers: what is not media is none of our business."""
    row = {"input_ids": [3, 4], "text": "the", "label": 1, "position_ids": [0, 1], "mm_token_type_ids": [0, 0]}
    assert make_model().generate_batch([row], greedy(2))["req_0"].error is None
    marked = make_model().generate_batch([row | {"mm_token_type_ids": [0, 1]}], greedy(2))["req_0"]
    assert "mm_token_type_ids: hf_cb takes text only" in marked.error
    with pytest.raises(OptionError, match="images=: hf_cb takes text only"):
        make_model().generate_batch([[3, 4]], greedy(2), images=[1])
