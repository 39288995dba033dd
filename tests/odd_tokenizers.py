"""Tiny tokenizers of every kind, made on the spot: byte-level, SentencePiece-like, WordPiece, and in plain Python."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

TEXTS = [
    "The quick brown fox doesn't jump, does it? They've said so... I'm sure!",
    "Grüße aus Köln, naïve café; e\u0301 a\u0308 combining marks",
    "日本語の文章と中文的句子，还有한국어 문장",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "emoji 😀 🎉 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 and\n\n\tspaces   here",
]
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SPECIAL = ["<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def wrap(tokenizer: Tokenizer, **kwargs: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **kwargs)


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrap(tokenizer)


def metaspace(*decoder_steps: Any) -> PreTrainedTokenizerFast:
    """A sentencepiece-like BPE whose vocabulary lacks most characters, which become byte tokens."""
    characters = ["▁", *sorted(set("".join(TEXTS[:1]).replace(" ", ""))), "日", "é", "\n"]
    pieces = [*SPECIAL, "<unk>", *BYTES, *characters, "▁t", "▁a", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁", "a"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(list(decoder_steps))
    tokenizer.add_special_tokens(SPECIAL)
    return wrap(tokenizer, unk_token="<unk>")


def llama_like() -> PreTrainedTokenizerFast:
    return metaspace(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))


def metaspace_decoder() -> PreTrainedTokenizerFast:
    return metaspace(decoders.ByteFallback(), decoders.Metaspace())


WORDS = [*SPECIAL, "[UNK]", "do", "does", "n", "'", "t", "s", "m", "ve", "re", "v", "r", ".", ",", "?", "!"]
WORDS += ["n't", "'s", "it", "##s", "##n", "##'", "##.", "nn", "vr", "the"]


def word_piece(decoder_cleanup: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=decoder_cleanup)
    tokenizer.add_special_tokens(SPECIAL)
    return wrap(tokenizer, unk_token="[UNK]", clean_up_tokenization_spaces=True)


def word_piece_cleaned_by_transformers() -> PreTrainedTokenizerFast:
    return word_piece(decoder_cleanup=False)


class SlowTokenizer(PreTrainedTokenizer):
    """A Python tokenizer over a list of pieces; subclasses say how pieces become text."""

    pieces: list[str] = []

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.pieces)} | self.added_tokens_encoder

    def _convert_token_to_id(self, token: str) -> int:
        return self.pieces.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.pieces[index]


class SlowBytes(SlowTokenizer):
    pieces = [*SPECIAL, "<unk>", *map(chr, range(256))]

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [chr(byte) for byte in text.encode()]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        parts = (t.encode() if t in self.pieces[:3] else bytes([ord(t)]) for t in tokens)
        return b"".join(parts).decode("utf-8", errors="replace")


class SlowBytesIgnoringErrors(SlowBytes):
    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return super().convert_tokens_to_string(tokens).replace(REPLACEMENT, "")


class SlowWords(SlowTokenizer):
    pieces = [*SPECIAL, "<unk>", *WORDS[3:]]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens).replace(" ##", "").strip()


class SlowPieces(SlowTokenizer):
    pieces = [*SPECIAL, "<unk>", "▁", "▁a", "b", "▁▁", "c"]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("▁", " ").strip()


def slow_words_cleaned() -> SlowWords:
    return SlowWords(clean_up_tokenization_spaces=True)


FAST = [byte_level, llama_like, metaspace_decoder, word_piece, word_piece_cleaned_by_transformers]
SLOW = [SlowBytes, SlowBytesIgnoringErrors, SlowWords, slow_words_cleaned, SlowPieces]
