"""Streamed text equals decoded text, for every kind of tokenizer and every way to cut the ids into pieces."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from odd_tokenizers import (
    FAST,
    REPLACEMENT,
    SLOW,
    TEXTS,
    SlowBytes,
    SlowBytesIgnoringErrors,
    SlowPieces,
    byte_level,
    llama_like,
    metaspace_decoder,
    word_piece_cleaned_by_transformers,
)

from hf_cb.text.detokenizer import Detokenizer, decode
from hf_cb.text.tokenizers import tokenizer_lock


def builders(*functions: Callable[[], Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("build", functions, ids=lambda build: build.__name__)


def pieces_of(ids: list[int], rng: random.Random, longest: int) -> Iterable[list[int]]:
    start = 0
    while start < len(ids):
        end = start + rng.randint(0, longest)
        yield ids[start:end]
        start = end


def stream(tokenizer: Any, pieces: Iterable[list[int]], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    chunks = []
    for piece in pieces:
        chunks.append(detokenizer.push(piece))
        assert detokenizer.text == "".join(chunks)
    return [*chunks, detokenizer.flush()]


def singly(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


@pytest.mark.parametrize("skip", [True, False], ids=["skip_special", "keep_special"])
@builders(*FAST, *SLOW)
def test_random_ids_join_to_the_decoded_text(build: Callable[[], Any], skip: bool) -> None:
    tokenizer, rng = build(), random.Random(7)
    top = len(tokenizer) + (3 if tokenizer.is_fast else 0)  # fast tokenizers leave unknown ids out
    for _ in range(150):
        favoured = rng.choices(range(top), k=6)
        population = favoured if rng.random() < 0.5 else range(top)
        ids = rng.choices(population, k=rng.randint(1, 90))
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, pieces_of(ids, rng, rng.choice([1, 4, 40])), skip)) == expected


@builders(byte_level, llama_like, metaspace_decoder, SlowBytes)
@pytest.mark.parametrize("text", TEXTS)
def test_no_chunk_holds_half_a_character(build: Callable[[], Any], text: str) -> None:
    tokenizer = build()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(stream(tokenizer, singly(ids))) == text  # so no replacement character in between


def test_text_comes_while_it_grows() -> None:
    tokenizer = byte_level()
    ids = tokenizer("日本 and so on")["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    for end, token_id in enumerate(ids, 1):
        detokenizer.push([token_id])
        assert detokenizer.text == tokenizer.decode(ids[:end]).rstrip(REPLACEMENT)


def test_byte_tokens_wait_for_the_end_of_their_run() -> None:
    """`é` followed by an invalid byte decodes to three replacement characters, so `é` was not final."""
    tokenizer = llama_like()
    good = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>", "e"])
    bad = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>", "<0xFF>", "e"])
    assert stream(tokenizer, singly(good))[:3] == ["", "", tokenizer.decode(good)]
    assert "".join(stream(tokenizer, singly(bad))) == tokenizer.decode(bad)
    assert tokenizer.decode(bad).startswith(3 * REPLACEMENT)


def test_a_special_token_does_not_end_a_run_of_bytes() -> None:
    tokenizer = llama_like()
    *start, end = tokenizer.convert_tokens_to_ids(["<0xE8>", "<0xAA>", "<0x9E>"])
    assert stream(tokenizer, singly([*start, 1, end])) == ["", "", "", "", "語"]


def test_a_window_of_spaces_is_not_cut() -> None:
    """Alone they decode to nothing, and the next word would lose the space before it."""
    tokenizer = SlowPieces()
    ids = tokenizer.convert_tokens_to_ids(["b", *["▁"] * 300, "c", "▁a"])
    assert "".join(stream(tokenizer, singly(ids))) == "b" + 300 * " " + "c a"


def test_a_decoder_that_revises_its_text_waits_for_the_flush() -> None:
    class Counting(SlowPieces):
        decoded = 0

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            self.decoded += len(tokens)
            return str(len(tokens)) + super().convert_tokens_to_string(tokens)

    tokenizer, ids = Counting(), [5] * 4000
    assert "".join(stream(tokenizer, singly(ids))) == "1b" + tokenizer.decode(ids)[2:]
    assert tokenizer.decoded < 50 * len(ids)


def test_a_prompt_cut_inside_a_character_gives_no_prompt_text() -> None:
    tokenizer = byte_level()
    ids = tokenizer("secret \U0001f9ff", add_special_tokens=False)["input_ids"]
    generated = [*ids[-2:], *tokenizer(" and on", add_special_tokens=False)["input_ids"]]
    text = "".join(stream(tokenizer, singly(generated)))
    assert text == tokenizer.decode(generated) and text.endswith(" and on")
    assert "\U0001f9ff" not in text and "secret" not in text


def test_clean_up_takes_back_no_space_that_was_given() -> None:
    tokenizer = word_piece_cleaned_by_transformers()
    ids = tokenizer.convert_tokens_to_ids(["it", "do", "n", "'", "t", "do", "."])
    assert tokenizer.decode(ids) == "it don't do."
    chunks = stream(tokenizer, singly(ids))
    assert "".join(chunks) == "it don't do."
    assert chunks[0] == "it"  # streamed, not kept for the flush


def test_incomplete_bytes_come_out_at_the_flush() -> None:
    tokenizer = byte_level()
    ids = tokenizer("ok \U0001f9ff", add_special_tokens=False)["input_ids"][:-1]
    detokenizer = Detokenizer(tokenizer)
    given = detokenizer.push(ids)
    assert given == "ok "
    assert given + detokenizer.flush() == tokenizer.decode(ids) == "ok " + REPLACEMENT
    assert detokenizer.flush() == ""
    with pytest.raises(RuntimeError, match="after flush"):
        detokenizer.push(ids)


def test_bytes_that_are_really_invalid_are_streamed() -> None:
    tokenizer = byte_level()
    invalid = tokenizer.convert_tokens_to_ids("ÿ")  # how byte-level BPE spells the byte 0xFF
    assert stream(tokenizer, [[invalid] * 100]) == [99 * REPLACEMENT, REPLACEMENT]


@builders(byte_level, llama_like, SlowBytesIgnoringErrors)
@pytest.mark.parametrize("kind", ["text", "garbage", "special"])
def test_the_cost_is_linear(build: Callable[[], Any], kind: str) -> None:
    """Counted in decoded tokens, so that a busy machine cannot make it fail."""
    tokenizer = build()
    text_ids = tokenizer("does it jump, " * 400, add_special_tokens=False)["input_ids"][:4000]
    garbage = tokenizer.convert_tokens_to_ids({llama_like: "<0xFF>"}.get(build, "ÿ"))
    ids = {"text": text_ids, "garbage": [garbage] * 4000, "special": [5, *[1] * 4000, 5]}[kind]
    plain_decode, decoded = tokenizer.decode, 0

    def counting(token_ids: list[int], **kwargs: Any) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return plain_decode(token_ids, **kwargs)

    expected = plain_decode(ids, skip_special_tokens=True)
    tokenizer.decode = counting
    assert "".join(stream(tokenizer, singly(ids))) == expected
    assert decoded < 50 * len(ids)


def test_decoding_holds_the_lock_of_the_tokenizer() -> None:
    tokenizer = SlowBytes()
    ids = tokenizer(TEXTS[4], add_special_tokens=False)["input_ids"]
    plain_decode = tokenizer.decode

    def checking(*args: Any, **kwargs: Any) -> str:
        assert tokenizer_lock(tokenizer).locked()
        return plain_decode(*args, **kwargs)

    tokenizer.decode = checking
    assert "".join(stream(tokenizer, singly(ids))) == decode(tokenizer, ids) == TEXTS[4]
