"""Stop strings through the face: `generate`'s tokens, text with the string or without, streamed or not, the reason."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tiny_models import generate_alone, greedy

from hf_cb import EngineConfig

TEXTS = ["the answer", "and the END.", "é", "0123"]


def strings_in(text: str) -> list[str]:
    """Strings of an answer that begin and end anywhere."""
    found = [text[at : at + length] for at in range(3, len(text) - 5, 4) for length in (1, 3, 5)]
    return [s for s in found if "\N{REPLACEMENT CHARACTER}" not in s]


@pytest.mark.parametrize("overlap", [False, True])
def test_as_generate_and_cut_on_request(speaker, tokenizer, overlap: bool) -> None:
    """All in one batch, each with its own string, beside requests with none."""
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    full = [tokenizer.decode(generate_alone(speaker, p, greedy(30)), skip_special_tokens=True) for p in prompts]
    jobs = [(i, s) for i, text in enumerate(full) for s in strings_in(text)[::3]]
    assert len(jobs) > 12
    config = EngineConfig(block_size=4, max_batch_tokens=32, overlap=overlap)
    with speaker.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            plain = [manager.submit(p, greedy(30)) for p in prompts]
            kept = [manager.submit(prompts[i], greedy(30), stop_strings=[s, "never this"]) for i, s in jobs]
            cut = [
                manager.submit(prompts[i], greedy(30), stop_strings=s, include_stop_str_in_output=False)
                for i, s in jobs
            ]
        streamed = ["".join(d.text for d in handle) for handle in cut]
        for (i, string), with_it, without, text in zip(jobs, kept, cut, streamed, strict=True):
            want = generate_alone(speaker, prompts[i], greedy(30, stop_strings=[string]), tokenizer=tokenizer)
            one, other = with_it.result(), without.result()
            assert one.generated_tokens == other.generated_tokens == want
            assert (one.finish_reason, one.stop_reason, other.stop_reason) == ("stop", string, string)
            assert one.text == tokenizer.decode(want, skip_special_tokens=True)
            assert other.text == text and one.text.startswith(text)
            if string in one.text:
                assert text == one.text[: one.text.index(string)]
        assert [h.result().text for h in plain] == full
        assert {h.result().stop_reason for h in plain} == {None}
    assert sum(s in h.result().text for (_, s), h in zip(jobs, kept, strict=True)) > 0.8 * len(jobs)


def test_a_string_that_the_prompt_begins(speaker, tokenizer) -> None:
    """`generate` looks at the prompt too; nothing of the answer is left then."""
    prompt = tokenizer(TEXTS[0])["input_ids"]
    first = tokenizer.decode(generate_alone(speaker, prompt, greedy(1)))
    string = "wer" + first[0]
    (result,) = speaker.generate_batch(
        [prompt], greedy(9), stop_strings=string, include_stop_str_in_output=False
    ).values()
    want = generate_alone(speaker, prompt, greedy(9, stop_strings=[string]), tokenizer=tokenizer)
    assert result.generated_tokens == want and len(want) == 1
    assert (result.text, result.stop_reason) == ("", string)


def test_the_reason_is_the_token_where_it_was_one(speaker, tokenizer) -> None:
    prompt = tokenizer(TEXTS[0])["input_ids"]
    tokens = generate_alone(speaker, prompt, greedy(9))
    eos = tokens[4]
    end = tokens.index(eos) + 1
    deltas = list(speaker.stream_batch([prompt], greedy(9, eos_token_id=[eos, 1])))
    assert sum((d.token_ids for d in deltas), []) == tokens[:end]
    assert [d.stop_reason for d in deltas] == [None] * (len(deltas) - 1) + [eos]
    (by_length,) = speaker.generate_batch([prompt], greedy(3)).values()
    (by_check,) = speaker.generate_batch([prompt], greedy(9), stopping_criteria=[lambda ids, scores: True]).values()
    assert (by_length.finish_reason, by_length.stop_reason) == ("length", None)
    assert (by_check.finish_reason, by_check.stop_reason, len(by_check.generated_tokens)) == ("stop", None, 1)
    both = tokenizer.decode([eos])
    (result,) = speaker.generate_batch([prompt], greedy(9, eos_token_id=eos), stop_strings=[both]).values()
    assert result.stop_reason == both and result.generated_tokens == tokens[:end]


def test_from_many_threads_that_share_a_tokenizer(speaker, tokenizer) -> None:
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    results: dict[int, Any] = {}
    full = [tokenizer.decode(generate_alone(speaker, p, greedy(30)), skip_special_tokens=True) for p in prompts]
    strings = [strings_in(text)[-1] for text in full]

    def work(manager: Any, i: int) -> None:
        mine = i % len(prompts)
        options = {"stop_strings": strings[mine], "include_stop_str_in_output": i % 2 == 0}
        handle = manager.submit(TEXTS[mine], greedy(30), **options)
        results[i] = ("".join(d.text for d in handle), handle.result().text)

    with speaker.continuous_batching_context_manager() as manager:
        threads = [threading.Thread(target=work, args=(manager, i)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 16
    for i, (streamed, whole) in results.items():
        mine = i % len(prompts)
        cut = full[mine][: full[mine].index(strings[mine])]
        assert streamed == whole and whole.startswith(cut) and (whole == cut) == (i % 2 == 1)
