"""Log-probabilities in the two shapes of OpenAI's API, and the text and bytes of single tokens."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_cb.text.detokenizer import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOWEST = -9999.0  # what OpenAI writes for "impossible": JSON has no infinity
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Tops = Sequence["dict[int, float] | None"]


class TokenTexts:
    """Texts and bytes of single tokens of one tokenizer; each is looked up once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token_id: int) -> str:
        return self.of(token_id)[0]

    def of(self, token_id: int) -> tuple[str, list[int]]:
        """Its text, with replacement characters where it is no whole character, and its UTF-8 bytes."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> tuple[str, list[int]]:
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        text = decode(self._tokenizer, [token_id], skip_special_tokens=False)
        if not isinstance(piece, str):
            return text, list(text.encode())
        if match := _BYTE_TOKEN.fullmatch(piece):
            return text, [int(match[1], 16)]
        if piece.startswith("\N{LOWER ONE EIGHTH BLOCK}") and not text.startswith(" "):
            text = " " + text  # SentencePiece's word boundary, which decoding drops at the beginning
        if _REPLACEMENT in text and all(c in _byte_alphabet() for c in piece):
            return text, [_byte_alphabet()[c] for c in piece]
        return text, list(text.encode())


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level BPE (GPT-2), and their bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def chat_logprobs(texts: TokenTexts, ids: Sequence[int], logprobs: Sequence[float], tops: Tops, k: int) -> dict:
    """The chat API's shape, for the tokens of one chunk or answer: exactly k alternatives to each."""
    content = []
    for token_id, logprob, top in zip(ids, logprobs, tops, strict=True):
        best = list((top or {}).items())[:k]
        content.append(_entry(texts, token_id, logprob) | {"top_logprobs": [_entry(texts, i, p) for i, p in best]})
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    text, as_bytes = texts.of(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": as_bytes}


def completion_logprobs(
    texts: TokenTexts,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Tops,
    k: int,
    offset: int = 0,
) -> dict[str, Any]:
    """The completion API's shape: the k best of each place and, besides, the token that stands there.

    `offset`: characters of text before the first token. A prompt's first token has no log-probability (None).
    """
    tokens = [texts.text(i) for i in ids]
    places: list[int] = []
    rows: list[dict[str, float] | None] = []
    for token_id, token, logprob, top in zip(ids, tokens, logprobs, tops, strict=True):
        places.append(offset)
        offset += len(token)
        if logprob is None:
            rows.append(None)
            continue
        row: dict[str, float] = {}
        for other, value in list((top or {}).items())[:k]:
            row.setdefault(texts.text(other), finite(value))  # of two tokens that look alike, the likelier
        row.setdefault(texts.text(token_id), finite(logprob))
        rows.append(row)
    values = [None if p is None else finite(p) for p in logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": rows, "text_offset": places}


def prompt_logprobs(texts: TokenTexts, tops: Tops) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each token of the prompt, ids to log-probability and text; None for the first."""
    return [
        None
        if top is None
        else {str(i): {"logprob": finite(p), "decoded_token": texts.text(i)} for i, p in top.items()}
        for top in tops
    ]


def known(tops: Tops | None, count: int) -> Tops:
    """The alternatives, or none for each token where only the tokens' own log-probabilities were asked for."""
    return [None] * count if tops is None else tops


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
