"""Bad input gets an error that names the value and the remedy, to its own caller; everybody else goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VOCAB, generate_alone, greedy, make_tokenizer
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import hf_cb
from hf_cb import EngineConfig, OptionError, PromptError

pytestmark = pytest.mark.usefixtures("patched")
GOOD = [5, 6, 7]

BAD_PROMPTS = {
    "empty": ([], ValueError, "no token ids|empty"),
    "negative": ([5, -1, 7], ValueError, "-1"),
    "beyond the embedding": ([5, VOCAB, 7], PromptError, f"{VOCAB} at place 1.*0 to {VOCAB - 1}"),
    "longer than the model": ([5] * 257, PromptError, "257 tokens.*256.*max_model_len"),
    "not ids": ([5, "six"], TypeError, "six"),
    "float tensor": (torch.tensor([0.5]), TypeError, "float"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_among_good_ones(shared_llama, name: str) -> None:
    prompt, _, message = BAD_PROMPTS[name]
    results = list(shared_llama.generate_batch([GOOD, prompt, GOOD], greedy()).values())
    want = generate_alone(shared_llama, GOOD, greedy())
    assert [r.generated_tokens for r in results] == [want, [], want]
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert results[1].is_finished() and results[1].index == 1
    with pytest.raises(Exception, match=message):
        raise results[1].exception


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_alone(shared_llama, name: str) -> None:
    prompt, kind, message = BAD_PROMPTS[name]
    with shared_llama.continuous_batching_context_manager() as manager:
        with pytest.raises(kind, match=message):
            manager.submit(prompt, greedy())
        with pytest.raises(kind, match=message):
            manager.add_request(prompt)
        assert manager.submit(GOOD, greedy()).result().generated_tokens == generate_alone(shared_llama, GOOD, greedy())


def test_a_prompt_longer_than_the_cache(shared_llama) -> None:
    config = EngineConfig(num_blocks=4, block_size=8)
    prompts = [GOOD, [5] * 33, [5] * 30]
    good, bad, long = shared_llama.generate_batch(prompts, greedy(4), config).values()
    assert good.error is None
    assert "33 tokens" in bad.error and "holds 32" in bad.error and "kv_budget" in bad.error
    assert "max_new_tokens=4" in long.error and "at most 3 new tokens" in long.error


def test_without_a_length_the_cache_cuts_it_short(shared_llama) -> None:
    config = EngineConfig(num_blocks=4, block_size=8)
    (result,) = shared_llama.generate_batch([GOOD], greedy(None), config).values()
    assert (result.finish_reason, len(result.generated_tokens)) == ("length", 30)
    assert result.generated_tokens == generate_alone(shared_llama, GOOD, greedy(30))


def test_without_a_length_the_model_ends_it(shared_llama) -> None:
    (result,) = shared_llama.generate_batch([[5] * 250], greedy(None)).values()
    assert (result.finish_reason, len(result.generated_tokens)) == ("length", 7)


@pytest.mark.parametrize("value", [0, -3, 1.5, "many", True])
def test_impossible_lengths(shared_llama, value) -> None:
    with pytest.raises(OptionError, match=f"max_new_tokens must be .*{value!r}"):
        shared_llama.generate_batch([GOOD], max_new_tokens=value)


def test_one_token_takes_one_step(shared_llama) -> None:
    with shared_llama.continuous_batching_context_manager() as manager:
        result = manager.submit(GOOD, greedy(1)).result()
        assert result.generated_tokens == generate_alone(shared_llama, GOOD, greedy(1))
        assert len(manager.trace()) == 1


def test_max_length_counts_the_prompt(shared_llama) -> None:
    options = GenerationConfig(max_length=10, do_sample=False, eos_token_id=-1)
    (result,) = shared_llama.generate_batch([GOOD], options).values()
    assert result.generated_tokens == generate_alone(shared_llama, GOOD, options) and len(result.generated_tokens) == 7
    (late,) = shared_llama.generate_batch([[5] * 10], options).values()
    assert "max_length=10" in late.error


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("options", [dict(max_length=12, min_new_tokens=7), dict(max_new_tokens=7, min_length=12)])
def test_lengths_that_only_some_prompts_allow(shared_llama, options) -> None:
    config = greedy(**{"max_new_tokens": None} | options)
    prompts = [[5] * n for n in (4, 5, 6)]
    results = shared_llama.generate_batch(prompts, config).values()
    assert [r.generated_tokens for r in results] == [generate_alone(shared_llama, p, config) for p in prompts]


def test_a_least_length_of_the_models_own_yields(shared_llama, monkeypatch) -> None:
    monkeypatch.setattr(shared_llama.generation_config, "min_new_tokens", 9)
    (result,) = shared_llama.generate_batch([GOOD], max_new_tokens=4).values()
    assert len(result.generated_tokens) == 4, "as in generate"


def test_a_live_request_id_is_taken(shared_llama) -> None:
    with shared_llama.continuous_batching_context_manager() as manager:
        handle = manager.submit(GOOD, greedy(100), request_id="mine")
        with pytest.raises(OptionError, match="'mine'"):
            manager.submit(GOOD, greedy(), request_id="mine")
        assert len(handle.result().generated_tokens) == 100
        assert manager.submit(GOOD, greedy(), request_id="mine").result().error is None, "free again"


BAD_OPTIONS = {
    "unknown": (dict(max_tokens=5), "max_tokens"),
    "beams": (dict(num_beams=4), "num_beams=4"),
    "assistant": (dict(prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens=3"),
    "attentions": (dict(output_attentions=True), "output_attentions=True"),
    "scores": (dict(output_scores="all"), "output_scores.*'all'"),
    "logprobs": (dict(logprobs=1.5), "logprobs.*1.5"),
    "more logprobs than tokens": (dict(logprobs=129), "logprobs must be between 0 and the 128.*129"),
    "negative logprobs": (dict(prompt_logprobs=-1), "prompt_logprobs.*-1"),
    "logprobs_mode": (dict(logprobs_mode="raw"), "logprobs_mode.*raw_logprobs.*'raw'"),
    "nothing asked": (dict(max_new_tokens=0), "at least 1, not 0 .*prompt_logprobs"),
    "nothing asked, several": (
        dict(max_new_tokens=0, prompt_logprobs=1, num_return_sequences=2, do_sample=True),
        "num_return_seq",
    ),
    "empty stop string": (dict(stop_strings=["a", ""], tokenizer=make_tokenizer()), "stop_strings"),
    "stop string": (dict(stop_strings=[3], tokenizer=make_tokenizer()), "stop_strings"),
    "include": (dict(include_stop_str_in_output="no"), "include_stop_str_in_output.*'no'"),
    "temperature": (dict(temperature="hot"), "temperature.*'hot'"),
    "seed": (dict(seed="x"), "seed.*'x'"),
    "max_time": (dict(max_time=-1), "max_time"),
    "more than the most": (dict(max_new_tokens=4, min_new_tokens=5), "min_new_tokens=5 .*max_new_tokens=4 .*smaller"),
    "longer than the longest": (dict(max_length=9, min_length=10), "min_length=10 .*max_length=9 "),
    "more than nothing": (dict(max_new_tokens=0, min_new_tokens=1, prompt_logprobs=0), "min_new_tokens=1 "),
    "sequences": (dict(num_return_sequences=0), "num_return_sequences"),
    "stop strings without a tokenizer": (dict(stop_strings=["END"]), "stop_strings.*tokenizer"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_raise_at_the_call(shared_llama, name: str) -> None:
    options, message = BAD_OPTIONS[name]
    for call in (shared_llama.generate_batch, shared_llama.stream_batch, shared_llama.iterate_batch):
        with pytest.raises((OptionError, TypeError), match=message):
            list(call([GOOD], **options))
    with shared_llama.continuous_batching_context_manager() as manager, pytest.raises(OptionError, match=message):
        manager.submit(GOOD, **options)


@pytest.mark.parametrize("inputs", [None, 5, {5, 6}, b"bytes"])
def test_inputs_that_hold_no_prompts(shared_llama, inputs) -> None:
    with pytest.raises(TypeError):
        shared_llama.generate_batch(inputs)


@pytest.mark.parametrize("prompt", ["text", [{"role": "user", "content": "hi"}]])
def test_text_and_chats_need_a_tokenizer(shared_llama, prompt) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        shared_llama.generate_batch([prompt])
    with shared_llama.continuous_batching_context_manager() as manager, pytest.raises(ValueError, match="tokenizer"):
        manager.submit(prompt)


def test_one_config_for_each_input(shared_llama) -> None:
    results = shared_llama.generate_batch([GOOD, GOOD], [greedy(3), greedy(5)])
    assert [len(r.generated_tokens) for r in results.values()] == [3, 5]
    with pytest.raises(OptionError, match="generation_config has 1 entries"):
        shared_llama.generate_batch([GOOD, GOOD], [greedy(3)])


ENGINE_OPTIONS = {
    "unknown": (dict(page=3), "page"),
    "zero": (dict(block_size=0), "block_size must be at least 1"),
    "type": (dict(max_batch_tokens="all"), "max_batch_tokens.*'all'"),
    "budget": (dict(kv_budget="lots"), "kv_budget.*'lots'"),
    "both": (dict(kv_budget="1MB", num_blocks=3), "num_blocks.*kv_budget"),
    "modules": (dict(modules="fast"), "modules='fast'"),
    "flag": (dict(prefix_caching="yes"), "prefix_caching.*'yes'"),
}


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
def test_bad_engine_options(llama, name: str) -> None:
    options, message = ENGINE_OPTIONS[name]
    with pytest.raises((OptionError, TypeError), match=message):
        hf_cb.accelerate(llama, **options)
    hf_cb.restore(llama)


@pytest.mark.parametrize(("options", "message"), [(dict(policy="mine"), "policy='mine'"), (dict(attention="x"), "'x'")])
def test_unknown_names(shared_llama, options, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        shared_llama.generate_batch([GOOD], greedy(), EngineConfig(**options))


def test_a_cache_without_room_for_a_block(shared_llama) -> None:
    with pytest.raises(OptionError, match="0 blocks.*kv_budget"):
        shared_llama.generate_batch([GOOD], greedy(), EngineConfig(kv_budget=100))


def test_transformers_options_are_converted_or_refused(shared_llama) -> None:
    page = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    theirs = ContinuousBatchingConfig(**{page: 8}, num_blocks=50, max_batch_tokens=6, use_cuda_graph=False)
    ours = EngineConfig.of(theirs)
    assert (ours.block_size, ours.num_blocks, ours.max_batch_tokens, ours.max_num_seqs) == (8, 50, 6, None)
    with pytest.raises(OptionError, match="cpu_offload_space"):
        shared_llama.generate_batch([GOOD], greedy(), ContinuousBatchingConfig(cpu_offload_space=1.0))
    with pytest.raises(OptionError, match="dict|GenerationConfig|EngineConfig"):
        shared_llama.generate_batch([GOOD], greedy(), 7)


@pytest.mark.parametrize("call", [hf_cb.accelerate, hf_cb.explain])
@pytest.mark.parametrize("model", ["gpt2", None])
def test_what_is_no_model_is_named(call: Any, model: Any) -> None:
    with pytest.raises(hf_cb.UnsupportedModelError, match=f"needed, not {model!r}"):
        call(model)


def test_a_message_without_its_text_is_an_error_and_not_an_empty_prompt(shared_llama: Any) -> None:
    hf_cb.accelerate(shared_llama, make_tokenizer())
    wrong: list[Any] = [
        [{"role": "user", "text": "hi"}],
        [{"role": "user", "content": "hi"}, {"content": "and?"}],
        [{"role": "user", "content": "hi"}, "and?"],
    ]
    results = list(shared_llama.generate_batch([*wrong, "fine"], max_new_tokens=2).values())
    hf_cb.restore(shared_llama)
    assert "message 0 of the chat has no content" in results[0].error
    assert "message 1 of the chat" in results[1].error and "no role" in results[1].error
    assert "no role" in results[2].error
    assert results[3].error is None
