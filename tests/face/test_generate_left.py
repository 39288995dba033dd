"""What the engine does not cover goes to `generate`'s own loop: right, with the reason, and with its own errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from routed import PROMPTS, padded, same
from tiny_models import make_model
from torch import nn
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import hf_cb
from hf_cb.manager.generating import keeping
from hf_cb.manager.generating.call import Call
from hf_cb.manager.generating.coverage import why_not

GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=6)


class Batch(LogitsProcessor):
    """What it does to a row depends on the others."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.index_fill(1, input_ids[:, -1], -100.0)


def with_embeds(model: Any) -> Any:
    embeds = model.get_input_embeddings()(padded()["input_ids"])
    return model.generate(inputs_embeds=embeds, attention_mask=padded()["attention_mask"], **GREEDY)


def with_cache(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    out = model.generate(**padded(PROMPTS[:1]), **GREEDY, past_key_values=cache)
    assert cache.get_seq_length() == out.shape[1] - 1, "the caller's cache is filled"
    return out


def with_positions(model: Any) -> Any:
    inputs = padded(PROMPTS[:2])
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return model.generate(**inputs, position_ids=3 * positions, **GREEDY)


def with_holes(model: Any) -> Any:
    inputs = padded([PROMPTS[1], PROMPTS[1][::-1]])
    inputs["attention_mask"][1, 4] = 0
    return model.generate(**inputs, **GREEDY)


def with_autocast(model: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.generate(**padded(), **GREEDY)


def options(**more: Any) -> Callable[[Any], Any]:
    return lambda model: model.generate(**padded(), **GREEDY | more)


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "beams": (options(num_beams=2), "beam search"),
    "prompt lookup": (
        lambda m: m.generate(**padded(PROMPTS[:1]), **GREEDY, prompt_lookup_num_tokens=2),
        "assisted decoding",
    ),
    "embeddings": (with_embeds, "inputs_embeds= is given"),
    "a cache": (with_cache, "(cache|past_key_values)= is given"),
    "a kind of cache": (options(cache_implementation="static"), "cache_implementation='static'"),
    "positions": (with_positions, "position_ids= are given"),
    "holes": (with_holes, "holes"),
    "right padding": (lambda m: m.generate(**padded(side="right"), **GREEDY), "padded on its right"),
    "scores of rows that end": (options(return_dict_in_generate=True, output_scores=True), "rows that have ended"),
    "watched scores": (
        options(return_dict_in_generate=True, output_logits=True, eos_token_id=None, max_time=99.0),
        "criteria that may look",
    ),
    "attentions": (options(return_dict_in_generate=True, output_attentions=True), "output_attentions=True"),
    "guidance": (options(guidance_scale=1.5), "guidance_scale=1.5"),
    "past the positions": (options(max_new_tokens=250), "may become 261 tokens long.*up to 256"),
    "a processor across rows": (options(logits_processor=LogitsProcessorList([Batch()])), "Batch may depend"),
    "autocast": (with_autocast, "autocast"),
}


@pytest.mark.parametrize(("call", "reason"), CASES.values(), ids=CASES)
def test_left_to_the_original(models, ways, call: Callable[[Any], Any], reason: str) -> None:
    plain, ours = models
    want = call(plain)
    assert ways.take() == []
    assert same(call(ours), want)
    (said,) = ways.take()
    assert re.search(reason, said), said
    assert same(options()(ours), options()(plain)) and ways.take() == []


def test_processes_that_must_step_together(models) -> None:
    plain, _ = models
    config, _ = plain._prepare_generation_config(None)
    plain._prepare_special_tokens(config, True, device="cpu", batch_size=4)
    config.max_length = 20
    criteria = plain._get_stopping_criteria(config, StoppingCriteriaList())
    call = Call(plain, padded()["input_ids"], LogitsProcessorList(), criteria, config)
    assert why_not(call) is None
    call.synced_gpus = True
    assert "synced_gpus" in str(why_not(call))


def test_models_that_are_not_what_they_were(models, ways) -> None:
    """A hook would see a step's tokens of many requests; prompt tuning replaces how inputs are prepared."""
    plain, ours = models
    want = options()(plain)
    hook = ours.model.layers[1].register_forward_hook(lambda *_: None)
    assert same(options()(ours), want) and "a hook watches the model" in ways.take()[0]
    hook.remove()
    usual = ours.prepare_inputs_for_generation
    ours.prepare_inputs_for_generation = lambda *args, **kwargs: usual(*args, **kwargs)
    assert same(options()(ours), want) and "prepare_inputs_for_generation was replaced" in ways.take()[0]
    ours.prepare_inputs_for_generation = usual  # as PEFT puts it back
    assert same(options()(ours), want) and ways.take() == []
    del ours.prepare_inputs_for_generation


def test_dropout_in_training(ways) -> None:
    """`generate` draws its dropout too; without any, training mode changes nothing, and is put back."""
    model = hf_cb.accelerate(make_model(attention_dropout=0.3).train(), modules="off")
    options()(model)
    assert "training mode, and attention_dropout of LlamaAttention" in ways.take()[0]
    model.eval()
    want = options()(model)
    assert ways.take() == []
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    model.train()
    model.model.layers[0].eval()
    before = [m.training for m in model.modules()]
    assert same(options()(model), want) and ways.take() == []
    assert [m.training for m in model.modules()] == before
    model.lm_head = nn.Sequential(model.lm_head, nn.Dropout(0.1))
    options()(model)
    assert "Dropout" in ways.take()[0]
    hf_cb.restore(model)


WRONG: dict[str, Callable[[Any], Any]] = {
    "a typo": options(max_new_tokns=3),
    "temperature": options(do_sample=True, temperature=-1.0),
    "no room": options(max_new_tokens=None, max_length=5),
    "several greedy sequences": options(num_return_sequences=2),
    "stop strings without a tokenizer": options(stop_strings=["a"]),
    "an id that there is not": lambda m: m.generate(torch.tensor([[1, 5000]]), **GREEDY),
    "no ids": lambda m: m.generate(torch.zeros(2, 0, dtype=torch.long), **GREEDY),
    "no batch": lambda m: m.generate(torch.tensor([1, 2, 3]), **GREEDY),
    "a mask of another shape": lambda m: m.generate(
        padded()["input_ids"], attention_mask=torch.ones(4, 5, dtype=torch.long), **GREEDY
    ),
    "both inputs": lambda m: m.generate(padded()["input_ids"], **padded(), **GREEDY),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_errors_are_generates_own(models, call: Callable[[Any], Any]) -> None:
    outcomes = []
    for model in models:
        try:
            outcomes.append(call(model).tolist())
        except Exception as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


def test_what_the_callers_own_code_raises(models) -> None:
    """It comes out as it is, and the next call is not harmed."""
    plain, ours = models

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("theirs")

    for given in (dict(logits_processor=[fail]), dict(stopping_criteria=[fail])):
        with pytest.raises(ZeroDivisionError, match="theirs"):
            ours.generate(**padded(PROMPTS[:1]), **GREEDY, **given)
        assert same(options()(ours), options()(plain))


def test_a_model_that_cannot_be_batched(models, ways, monkeypatch) -> None:
    """It is told once, and not tried again."""
    plain, ours = models
    tried = []

    def refuse(*_: Any) -> Any:
        tried.append(1)
        raise hf_cb.UnsupportedModelError("no path agrees")

    monkeypatch.setattr(keeping, "ContinuousBatchingManager", refuse)
    for _ in range(2):
        assert same(options()(ours), options()(plain)) and ways.take() == ["no path agrees"]
    assert len(tried) == 1
    monkeypatch.undo()
    hf_cb.accelerate(ours, modules="off")
    assert same(options()(ours), options()(plain)) and ways.take() == []


def test_a_cache_that_is_too_small(models, ways) -> None:
    plain, ours = models
    hf_cb.accelerate(ours, modules="off", num_blocks=2, block_size=4)
    assert same(options()(ours), options()(plain)) and "the cache has 2" in ways.take()[0]


def test_a_step_that_fails(models, ways, monkeypatch) -> None:
    """The original loop starts again, since nobody has seen a token."""
    from hf_cb.models.paged import PagedModel

    plain, ours = models
    options()(ours)

    def fail(*_: Any) -> Any:
        raise RuntimeError("a broken step")

    monkeypatch.setattr(PagedModel, "forward", fail)
    assert same(options()(ours), options()(plain)) and "a broken step" in ways.take()[0]
    monkeypatch.undo()
    assert same(options()(ours), options()(plain)) and ways.take() == []


def test_from_within_a_step(models, ways) -> None:
    """A processor that generates by itself, in the engine's thread."""
    plain, ours = models

    def process(model: Any) -> Callable[..., Any]:
        def ask(ids: Any, scores: Any) -> Any:
            return scores.index_fill(1, model.generate(ids, do_sample=False, max_new_tokens=1)[0, -1:], -100.0)

        return ask

    want, got = (m.generate(**padded(PROMPTS[:1]), **GREEDY, logits_processor=[process(m)]) for m in models)
    assert same(got, want) and all("within a step" in reason for reason in ways.take())
