"""Text in and out through the face: chats, one BOS, whole characters, stop strings, the folder's tokenizer."""

from __future__ import annotations

import torch
from tiny_models import VOCAB, generate_alone, greedy, make_model

import hf_cb

TEXTS = ["the answer", "and the END.", "é"]
CHAT = [{"role": "user", "content": "the answer?"}]


def test_texts_are_tokenized_as_the_tokenizer_does(speaker, tokenizer) -> None:
    results = list(speaker.generate_batch(TEXTS, greedy()).values())
    for text, result in zip(TEXTS, results, strict=True):
        assert result.prompt_ids == tokenizer(text)["input_ids"]
        assert result.generated_tokens == generate_alone(speaker, result.prompt_ids, greedy())
        assert result.text == tokenizer.decode(result.generated_tokens, skip_special_tokens=True)


def test_what_a_tokenizer_returns(speaker, tokenizer) -> None:
    want = [r.generated_tokens for r in speaker.generate_batch(TEXTS, greedy()).values()]
    encoding = tokenizer(TEXTS, padding=True, return_tensors="pt")
    for form in ({"inputs": encoding}, dict(encoding), {"inputs": tokenizer(TEXTS)}):
        got = [r.generated_tokens for r in speaker.generate_batch(generation_config=greedy(), **form).values()]
        assert got == want


def test_a_chat_has_one_bos(speaker, tokenizer) -> None:
    one, also = (speaker.generate_batch(x, greedy()) for x in (CHAT, [CHAT]))
    (result,) = one.values()
    assert result.prompt_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(result.prompt_ids) == "<bos>user: the answer?\nassistant: "
    assert [r.generated_tokens for r in also.values()] == [result.generated_tokens]


def test_chat_template_kwargs(speaker, tokenizer) -> None:
    options = {"add_generation_prompt": False}
    (result,) = speaker.generate_batch([CHAT], greedy(2), chat_template_kwargs=options).values()
    assert tokenizer.decode(result.prompt_ids).endswith("?\n")
    with speaker.continuous_batching_context_manager() as manager:
        handle = manager.submit(CHAT, greedy(2), chat_template_kwargs=options)
        assert handle.result().prompt_ids == result.prompt_ids


def test_streamed_text_adds_up_and_has_no_half_characters(speaker, tokenizer) -> None:
    options = greedy(60, do_sample=True, temperature=3.0, top_k=0)
    text = ["", "", ""]
    tokens: list[list[int]] = [[], [], []]
    for delta in speaker.stream_batch(TEXTS, options, seed=3):
        text[delta.index] += delta.text
        tokens[delta.index] += delta.token_ids
    assert text == [tokenizer.decode(t, skip_special_tokens=True) for t in tokens]
    with speaker.continuous_batching_context_manager() as manager:
        handle = manager.submit(TEXTS[0], options, seed=3)
        assert "".join(d.text for d in handle) == handle.result().text == text[0]


def test_a_character_of_several_tokens_comes_whole(speaker, tokenizer) -> None:
    """The model is made to say an emoji, a byte at a time."""
    smile = tokenizer("\N{GRINNING FACE}", add_special_tokens=False)["input_ids"]
    assert len(smile) > 1
    script = iter(smile + smile)

    def say(ids, scores):
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([next(script)]), 0.0)

    deltas = list(speaker.stream_batch(["a"], greedy(2 * len(smile)), logits_processor=[say]))
    assert "".join(d.text for d in deltas) == "\N{GRINNING FACE}" * 2
    assert all("\N{REPLACEMENT CHARACTER}" not in d.text for d in deltas)


def test_stop_strings_as_in_generate(speaker, tokenizer) -> None:
    """Also across token boundaries."""
    prompt = tokenizer(TEXTS[0])["input_ids"]
    said = [tokenizer.decode(t) for t in generate_alone(speaker, prompt, greedy(40))]
    plain = [i for i in range(4, 39) if (said[i] + said[i + 1]).isascii() and (said[i] + said[i + 1]).isalnum()]
    stop = said[plain[0]][-1] + said[plain[0] + 1][0]
    want = generate_alone(speaker, prompt, greedy(40, stop_strings=[stop]), tokenizer=tokenizer)
    (result,) = speaker.generate_batch([prompt], greedy(40, stop_strings=[stop])).values()
    assert result.generated_tokens == want and len(want) < 40 and result.finish_reason == "stop"
    (also,) = speaker.generate_batch([prompt], greedy(40), stop_strings=stop, tokenizer=tokenizer).values()
    assert also.generated_tokens == want


def test_the_tokenizer_of_the_models_folder(tokenizer, tmp_path) -> None:
    make_model("Llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    hf_cb.patch()
    (result,) = model.generate_batch(TEXTS[:1], greedy(3)).values()
    assert result.text is not None and result.prompt_ids == tokenizer(TEXTS[0])["input_ids"]


def test_ids_beyond_the_tokenizer_are_no_reason_to_fail(speaker) -> None:
    (result,) = speaker.generate_batch([[VOCAB - 1]], greedy(3)).values()
    assert result.error is None and result.text is not None
