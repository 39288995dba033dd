"""Stop strings end an answer where transformers' StopStringCriteria does, and a text that is cut at them is the same
whether it comes at once or grows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from odd_tokenizers import TEXTS, SlowBytes, SlowPieces, SlowWords, byte_level, llama_like, wrap
from odd_tokenizers import metaspace_decoder as metaspace
from tiny_models import make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import StopStringCriteria

from hf_cb.errors import OptionError
from hf_cb.text.detokenizer import decode
from hf_cb.text.rendering import Rendering
from hf_cb.text.stop_strings import StopStrings

LETTERS = "abcdefghij"


def word_piece() -> Any:
    """One whose vocabulary has single letters, at the start of words and inside them."""
    words = ["<s>", "</s>", "[UNK]", *LETTERS, *(f"##{c}" for c in LETTERS), "##ab", "bad", "##ed", ".", "!"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return wrap(tokenizer, unk_token="[UNK]", clean_up_tokenization_spaces=True)


def unigram() -> Any:
    """SentencePiece without bytes."""
    pieces = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in LETTERS)]
    pieces += [("▁ab", -1.0), ("cd", -1.5), ("▁▁", -2.0), ("é", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return wrap(tokenizer, unk_token="<unk>")


KINDS = [byte_level, llama_like, metaspace, word_piece, unigram, make_tokenizer, SlowBytes]


@pytest.fixture(scope="module", params=KINDS, ids=lambda build: build.__name__)
def tokenizer(request: Any) -> Any:
    return request.param()


def random_ids(tokenizer: Any, rng: random.Random) -> list[int]:
    """Any tokens, also special ones, halves of characters, and ids beyond the vocabulary; or a text's."""
    if rng.random() < 0.5 and not isinstance(tokenizer, SlowBytes):
        ids = tokenizer(rng.choice(TEXTS), add_special_tokens=False)["input_ids"]
        start = rng.randrange(len(ids))
        return ids[start : start + 14]
    top = len(tokenizer) if isinstance(tokenizer, SlowBytes) else len(tokenizer) + 3
    few = [rng.randrange(top) for _ in range(6)]  # so that something comes twice
    return [rng.choice(few) if rng.random() < 0.7 else rng.randrange(top) for _ in range(14)]


def random_strings(tokenizer: Any, ids: list[int], rng: random.Random) -> list[str]:
    """Pieces of what these ids say, cut anywhere, and some that are nowhere."""
    text = tokenizer.decode([i for i in ids if i < len(tokenizer)]) + " ab"
    found = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(text))
        found.append(text[at : at + rng.choice([1, 2, 3, 5, 9])])
    return found


def test_ends_where_transformers_does(tokenizer: Any) -> None:
    rng, stopped = random.Random(1), 0
    for _ in range(120):
        ids = random_ids(tokenizer, rng)
        strings = random_strings(tokenizer, ids, rng)
        try:
            theirs = StopStringCriteria(tokenizer, strings)
        except ValueError:  # no token can end one of them
            continue
        ours = StopStrings(tokenizer, strings)
        for end in range(1, len(ids) + 1):
            want = bool(theirs(torch.tensor([ids[:end]]), None))
            assert bool(ours(ids[:end])) == want, (strings, ids[:end])
            stopped += want
    assert stopped > 30


def outcome(tokenizer: Any, stops: StopStrings, prompt: list[int], ids: list[int]) -> tuple[list[int], str | None]:
    """What is generated of these ids, and why it ends."""
    for end in range(1, len(ids) + 1):
        if found := stops(prompt + ids[:end]):
            return ids[:end], str(found)
    return ids, None


@pytest.mark.parametrize("skip", [True, False])
def test_a_growing_text_is_the_whole_text(tokenizer: Any, skip: bool) -> None:
    """For any cut of the tokens into deltas, and any cut of the strings among the tokens."""
    rng, cut, shows, exact = random.Random(2), 0, 0, 0
    for _ in range(150):
        ids = [i for i in random_ids(tokenizer, rng) if i < len(tokenizer)]
        prompt = ids[: rng.choice([0, 0, 1, 3])]
        stops = StopStrings(tokenizer, random_strings(tokenizer, ids, rng))
        said, reason = outcome(tokenizer, stops, prompt, ids[len(prompt) :])
        rendering = Rendering(tokenizer, stops, skip)
        whole = rendering.text(prompt, said, reason)
        full = decode(tokenizer, said, skip)
        assert Rendering(tokenizer, None, skip).text(prompt, said, reason) == full
        if reason is None:
            assert whole == full
        else:
            cut += 1
            assert full.startswith(whole)
            if reason in full and stops.match([*prompt, *said]).token >= len(prompt):
                shows, exact = shows + 1, exact + (full.index(reason) == len(whole))
        for longest in (1, 2, 5):
            reader, text, rest = rendering.reader(prompt), "", list(said)
            while rest:
                size = rng.randint(1, longest)
                text += reader.push(rest[:size])
                rest = rest[size:]
                assert whole.startswith(text), "what was given is never taken back"
            assert text + reader.end(reason) == whole
    assert cut >= 30 and exact > 0.8 * shows > 0


@pytest.mark.parametrize("build", [byte_level, llama_like, metaspace])
def test_cut_at_every_place_of_a_text(build: Any) -> None:
    """The text up to the string, whatever its tokens: characters of several bytes, emoji of several characters."""
    tokenizer = build()
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        full = decode(tokenizer, ids)
        for start in range(0, len(full), 3):
            for length in (1, 2, 6):
                string = full[start : start + length]
                if len(string) < length:
                    continue
                stops = StopStrings(tokenizer, string)
                said, reason = outcome(tokenizer, stops, [], ids)
                assert reason == string
                lead = "" if build is byte_level else " "  # the first word's, which decoding drops
                want = (lead + full)[: (lead + full).index(string)].removeprefix(lead)
                rendering = Rendering(tokenizer, stops)
                assert rendering.text([], said, reason) == want
                reader = rendering.reader([])
                assert "".join([*(reader.push([i]) for i in said), reader.end(reason)]) == want


def test_which_one_and_where() -> None:
    """The one that begins first; what was begun in the prompt leaves nothing."""
    tokenizer = byte_level()

    def ids(text: str) -> list[int]:
        return [i for c in text for i in tokenizer(c, add_special_tokens=False)["input_ids"]]

    stops = StopStrings(tokenizer, ["d e", "END", "ND", "bcd e"])
    assert stops(ids("abcd e")) == "bcd e" and stops(ids("abcd e.")) is False
    assert stops(ids("END")) == "END" and stops(ids("aND")) == "ND"
    rendering = Rendering(tokenizer, stops)
    assert rendering.text(ids("a E"), ids("ND"), "END") == ""
    assert rendering.text(ids("a"), ids(" END"), "END") == " "
    reader = rendering.reader(ids("a E"))
    assert reader.push(ids("N")) == "" and reader.end(None) == "N", "it was none"


def test_a_token_that_begins_before_and_ends_after_the_string() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["answering"])
    answer = tokenizer("answering", add_special_tokens=False)["input_ids"]
    assert len(answer) == 1
    stops = StopStrings(tokenizer, "swe")
    match = stops.match(answer)
    assert (match.string, match.token, match.offset, match.rest) == ("swe", 0, 2, 7)
    assert Rendering(tokenizer, stops).text([], answer, "swe") == "an"


@pytest.mark.parametrize("strings", ["", [], [""], ["a", None], 3, ("a", b"b")])
def test_what_is_no_stop_string(strings: Any) -> None:
    with pytest.raises(OptionError, match="stop_strings"):
        StopStrings(byte_level(), strings)


@pytest.mark.parametrize("build", [SlowWords, SlowPieces])
def test_a_tokenizer_whose_tokens_have_no_text(build: Any) -> None:
    """transformers' own cannot be made for it either."""
    with pytest.raises(OptionError, match=f"{build.__name__}.*eos_token_id"):
        StopStrings(build(), "a")
    with pytest.raises(Exception):  # noqa: B017
        StopStringCriteria(build(), "a")
