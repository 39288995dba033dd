"""Options that GenerationConfig does not have: their meaning, and bad values refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from option_cases import PROMPT, TOKENIZER, manager_of
from tiny_models import generate_alone, greedy
from transformers import SuppressTokensLogitsProcessor

from hf_cb import OptionError

pytestmark = pytest.mark.usefixtures("patched")

BAD = {
    "presence_penalty": [("much", "presence_penalty.*'much'"), (float("nan"), "nan"), (True, "True")],
    "frequency_penalty": [([1], r"frequency_penalty.*\[1\]"), (float("inf"), "finite.*inf")],
    "logit_bias": [
        ([1, 2], "dict"),
        ({"seven": 1.0}, "'seven'.*0 to 127"),
        ({128: 1.0}, "128.*0 to 127"),
        ({"-1": 1.0}, "'-1'"),
        ({True: 1.0}, "True"),
        ({1.5: 1.0}, "1.5"),
        ({7: "high"}, r"logit_bias\[7\].*'high'"),
        ({7: float("inf")}, r"logit_bias\[7\].*inf"),
        ({7: 1e39}, r"logit_bias\[7\].*float32"),
        ({7: 1.0, "7": 2.0}, "7 twice"),
    ],
    "ignore_eos": [("yes", "ignore_eos.*'yes'"), (1, "1")],
    "skip_special_tokens": [(0, "skip_special_tokens.*0")],
    "truncate_prompt_tokens": [(0, "truncate_prompt_tokens.*0"), (-2, "-2"), (2.0, "2.0"), (True, "True")],
    "negative_prompt_ids": [
        ([[3], [4]], r"negative_prompt_ids.*\(2, 1\)"),
        ([3, 128], "negative_prompt_ids.*0 to 127"),
        ("no", "negative_prompt_ids"),
        ([0.5], "negative_prompt_ids"),
    ],
    "negative_prompt_attention_mask": [([1, 1], "needs negative_prompt_ids")],
    "prefix_allowed_tokens_fn": [([1, 2], "prefix_allowed_tokens_fn must be callable")],
    "bad_words_ids": [([[128]], "bad_words_ids.*128.*127"), ([], "bad_words_ids"), ([7], "bad_words_ids=.*7")],
    "sequence_bias": [
        ([[[1, 128], 2.0]], "sequence_bias.*128"),
        ([[[1], 2]], "sequence_bias"),
        ([[[1], float("nan")]], "NaN"),
        ("x", "sequence_bias"),
    ],
    "typical_p": [(-0.5, "typical_p=-0.5")],
    "top_h": [(7.0, "top_h=7.0")],
    "exponential_decay_length_penalty": [((2, 1.5), "needs an eos_token_id")],
    "num_return_sequences": [(2, "num_return_sequences")],  # greedily
    "repetition_penalty": [(-1.0, "repetition_penalty=-1.0")],
    "suppress_tokens": [("x", "suppress_tokens='x'"), ([1.5], "suppress_tokens.*1.5"), (5, "suppress_tokens=5")],
    "begin_suppress_tokens": [([True], "begin_suppress_tokens.*True")],
    "temperature": [(0.0, "more than 0.*not 0.0.*do_sample=False"), (-1, "temperature.*-1")],
    "do_sample": [("no", "do_sample.*'no'")],
    "forced_bos_token_id": [(128, "forced_bos_token_id.*128.*0 to 127"), ("x", "forced_bos_token_id.*'x'")],
    "forced_eos_token_id": [(128, "forced_eos_token_id.*128"), (True, "forced_eos_token_id.*True")],
    "no_repeat_ngram_size": [(True, "no_repeat_ngram_size.*True")],
    "guidance_scale": [("x", "guidance_scale.*'x'"), (float("nan"), "guidance_scale.*nan")],
    "watermarking_config": [("x", "watermarking_config='x'"), ({"foo": 1}, "watermarking_config=.*foo")],
    "pad_token_id": [("x", "pad_token_id='x'")],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused_by_name_before_anything_runs(shared_llama, name: str) -> None:
    options: dict[str, Any] = dict(eos_token_id=-1, do_sample=name in ("typical_p", "top_h", "temperature"))
    for value, message in BAD[name]:
        with pytest.raises(OptionError, match=message):
            shared_llama.generate_batch([PROMPT], **options | {name: value})
    with manager_of(shared_llama, "native") as manager:
        good = manager.submit(PROMPT, greedy(3))
        with pytest.raises(OptionError, match=BAD[name][0][1]):
            manager.submit(PROMPT, **options | {name: BAD[name][0][0]})
        assert good.result().generated_tokens == generate_alone(shared_llama, PROMPT, greedy(3))


def test_bans_of_ids_that_no_vocabulary_has_change_nothing(shared_llama) -> None:
    beyond = dict(suppress_tokens=[2**40, -1, 128], eos_token_id=[2**40], min_new_tokens=3)
    (result,) = shared_llama.generate_batch([PROMPT], greedy(5, **beyond)).values()
    assert result.error is None
    assert result.generated_tokens == generate_alone(shared_llama, PROMPT, greedy(5))


def test_none_is_as_if_not_given(shared_llama) -> None:
    names = ["presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos", "skip_special_tokens"]
    given = dict.fromkeys([*names, "truncate_prompt_tokens", "seed"])
    (result,) = shared_llama.generate_batch([PROMPT], greedy(5), **given).values()
    assert result.generated_tokens == generate_alone(shared_llama, PROMPT, greedy(5))


def test_a_banned_token_is_never_drawn(shared_llama) -> None:
    plain = generate_alone(shared_llama, PROMPT, greedy(5))
    (result,) = shared_llama.generate_batch([PROMPT], greedy(5), logit_bias={str(plain[0]): -100}).values()
    suppressed = generate_alone(
        shared_llama, PROMPT, greedy(5), logits_processor=[SuppressTokensLogitsProcessor([plain[0]])]
    )
    assert result.generated_tokens == suppressed


def test_penalties_look_at_the_output_alone(shared_llama) -> None:
    """However often the prompt has a token."""
    first = generate_alone(shared_llama, PROMPT, greedy(1))
    prompt = [*PROMPT, *first * 3]
    plain = generate_alone(shared_llama, prompt, greedy(1))
    (result,) = shared_llama.generate_batch([prompt], greedy(1), presence_penalty=50.0, frequency_penalty=50.0).values()
    assert result.generated_tokens == plain
    (longer,) = shared_llama.generate_batch([prompt], greedy(30), presence_penalty=1e4).values()
    assert len(set(longer.generated_tokens)) == 30, "no token twice"


def test_ignore_eos(shared_llama) -> None:
    plain = generate_alone(shared_llama, PROMPT, greedy(8))
    stopping = greedy(8, eos_token_id=[plain[2]])
    first, second = shared_llama.generate_batch([PROMPT] * 2, stopping).values()
    assert first.generated_tokens == plain[: plain.index(plain[2]) + 1] and first.finish_reason == "stop"
    (deaf,) = shared_llama.generate_batch([PROMPT], stopping, ignore_eos=True).values()
    assert deaf.generated_tokens == plain and deaf.finish_reason == "length"


def test_special_tokens_in_text_and_deltas(shared_llama) -> None:
    """Forced by a bias: <pad>, <bos> and <eos> are the first three ids."""
    options = dict(logit_bias={1: 1e5}, max_new_tokens=3, do_sample=False, eos_token_id=-1)
    with manager_of(shared_llama, "native") as manager:
        for skip, want in ((True, ""), (False, "<bos><bos><bos>"), (None, "")):
            handle = manager.submit(PROMPT, **options, skip_special_tokens=skip)
            assert "".join(delta.text for delta in handle) == want
            assert handle.result().text == want
    stream = shared_llama.stream_batch([PROMPT], **options, skip_special_tokens=False, tokenizer=TOKENIZER)
    assert "".join(delta.text for delta in stream) == "<bos><bos><bos>"


@pytest.mark.parametrize("keep", [1, 5, 12, 400])
def test_a_truncated_prompt_keeps_its_end(shared_llama, keep: int) -> None:
    (result,) = shared_llama.generate_batch([PROMPT], greedy(5), truncate_prompt_tokens=keep).values()
    assert result.prompt_ids == PROMPT[-keep:] and result.metrics.prompt_tokens == min(keep, 12)
    assert result.generated_tokens == generate_alone(shared_llama, PROMPT[-keep:], greedy(5))


def test_a_prompt_longer_than_the_model_may_be_cut_to_what_fits(shared_llama) -> None:
    prompt = PROMPT * 30
    (result,) = shared_llama.generate_batch([prompt], greedy(6), truncate_prompt_tokens=-1).values()
    assert result.prompt_ids == prompt[-250:] and len(result.generated_tokens) == 6
