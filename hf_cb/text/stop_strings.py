"""Stop strings across token boundaries: where an answer ends, and where its text does.

An answer ends exactly when `generate`'s would: the rule is that of transformers' StopStringCriteria, which looks at the
text of single tokens (bytes, where the tokenizer has tokens for bytes), prompt included. A stop string counts if its
last piece lies in the newest token, whatever else that token brings. Only the newest few tokens are looked at, each
token's text is asked for once, and one check takes a few microseconds.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hf_cb.errors import OptionError, describe
from hf_cb.text.tokenizers import tokenizer_lock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece: TypeAlias = Any
"""What a token adds to a text: str, or bytes where tokens are bytes; None for an id that is no token."""

Alphabet = Literal["byte_level", "byte_fallback"]
_CONTEXT = "abcdef"  # in front of a token that is decoded, so that its own leading space stays


@dataclass(frozen=True)
class Match:
    """A stop string in token ids: it begins in token number `token`, `offset` characters or bytes into it."""

    string: str
    token: int
    offset: int
    rest: int  # characters of that token from there on


class StopStrings:
    """A StopCheck, and what readers of a text need who do not want the stop string in it.

    Args:
        strings: one or several, none of them empty.

    Raises:
        OptionError: a wrong type or value, or a tokenizer whose tokens have no text of their own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: str | Sequence[str]) -> None:
        given = [strings] if isinstance(strings, str) else strings
        if not isinstance(given, (list, tuple)) or not given or not all(isinstance(s, str) and s for s in given):
            raise OptionError(f"stop_strings must be a string or a list of strings, none of them empty: {strings!r}.")
        self.strings = tuple(given)
        self._vocabulary = _vocabulary_of(tokenizer)
        self._tokenizer = tokenizer
        self._known = self._vocabulary.pieces
        in_bytes = self._vocabulary.alphabet is not None
        self._wanted: list[Piece] = [s.encode() if in_bytes else s for s in self.strings]
        self._lasts = [wanted[-1:] for wanted in self._wanted]  # what ends in the newest token has its own end in it
        self._nothing: Piece = b"" if in_bytes else ""
        self.reach = max(map(len, self._wanted))  # tokens that may matter, as each has at least one character

    def __call__(self, token_ids: Sequence[int]) -> str | bool:
        found = self.match(token_ids)
        return found.string if found is not None else False

    def match(self, token_ids: Sequence[int]) -> Match | None:
        """The stop string that the newest token completes; of several, the one that begins first."""
        newest = self._piece(token_ids[-1])
        if not newest or not any(last in newest for last in self._lasts):
            return None
        pieces = self._tail(token_ids, self.reach - 1 + len(newest))
        text = self._nothing.join(pieces)
        best, string = len(text), ""
        for wanted, name in zip(self._wanted, self.strings, strict=True):
            at = text.find(wanted, max(0, len(text) - len(newest) - len(wanted) + 1))
            if 0 <= at < best:
                best, string = at, name
        return Match(string, *self._place(token_ids, pieces, best)) if string else None

    def waiting(self, token_ids: Sequence[int]) -> int:
        """How many of the newest tokens hold a stop string, or what may be the beginning of one."""
        if not token_ids:
            return 0
        if (found := self.match(token_ids)) is not None:
            return len(token_ids) - found.token
        pieces = self._tail(token_ids, self.reach - 1)
        text = self._nothing.join(pieces)
        for at in range(max(0, len(text) - self.reach + 1), len(text)):
            if any(len(wanted) > len(text) - at and wanted.startswith(text[at:]) for wanted in self._wanted):
                return len(token_ids) - self._place(token_ids, pieces, at)[0]
        return 0

    def _place(self, token_ids: Sequence[int], pieces: list[Piece], at: int) -> tuple[int, int, int]:
        """In which token the text of the newest pieces has its character `at`, where in it, and what follows there."""
        token = len(token_ids) - len(pieces)
        for piece in pieces:
            if at < len(piece):
                rest = piece[at:]
                return token, at, len(rest.decode(errors="replace") if isinstance(rest, bytes) else rest)
            at -= len(piece)
            token += 1
        raise AssertionError("beyond the end")

    def _tail(self, token_ids: Sequence[int], length: int) -> list[Piece]:
        """The newest pieces, oldest first, until they have that length, or one has none to give."""
        pieces: list[Piece] = []
        for token_id in _backwards(token_ids, self.reach):
            piece = self._piece(token_id)
            if piece is None:
                break
            pieces.append(piece)
            length -= len(piece)
            if length <= 0:
                break
        pieces.reverse()
        return pieces

    def _piece(self, token_id: int) -> Piece:
        if token_id not in self._known:
            self._known[token_id] = self._vocabulary.decode(self._tokenizer, token_id)
        return self._known[token_id]


def _backwards(token_ids: Sequence[int], count: int) -> Iterator[int]:
    for i in range(len(token_ids) - 1, max(-1, len(token_ids) - 1 - count), -1):
        yield token_ids[i]


@dataclass(frozen=True)
class _Vocabulary:
    """How a tokenizer's tokens become text, and the pieces that were asked for. Holds no tokenizer."""

    alphabet: Alphabet | None
    context: list[str]
    byte_of: dict[str, int]
    pieces: dict[int, Piece] = field(default_factory=dict)

    def decode(self, tokenizer: PreTrainedTokenizerBase, token_id: int) -> Piece:
        with tokenizer_lock(tokenizer):
            token: Any = tokenizer.convert_ids_to_tokens(token_id)
            if token is None:
                return None
            if self.alphabet == "byte_level" and all(char in self.byte_of for char in token):
                return bytes(self.byte_of[char] for char in token)
            if self.alphabet == "byte_fallback" and (byte := _fallback_byte(token)) is not None:
                return bytes([byte])
            text = tokenizer.convert_tokens_to_string([*self.context, token])
        _, found, piece = text.partition(_CONTEXT)
        if not found:
            return None
        return piece.encode() if self.alphabet else piece


def _fallback_byte(token: str) -> int | None:
    try:
        return int(token[3:5], 16) if len(token) == 6 and token.startswith("<0x") and token.endswith(">") else None
    except ValueError:
        return None


_vocabularies: weakref.WeakKeyDictionary[Any, _Vocabulary] = weakref.WeakKeyDictionary()


def _vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> _Vocabulary:
    found = _vocabularies.get(tokenizer)
    if found is None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        alphabet = _alphabet(tokenizer)
        try:
            with tokenizer_lock(tokenizer):
                context: Any = tokenizer.convert_ids_to_tokens(
                    tokenizer(_CONTEXT, add_special_tokens=False)["input_ids"]
                )
                text = tokenizer.convert_tokens_to_string(context)
            if alphabet != "byte_level" and _CONTEXT not in text:
                raise ValueError(f"{_CONTEXT!r} becomes {text!r}")
        except Exception as error:  # whatever a tokenizer of somebody's own does
            raise OptionError(
                f"stop_strings need the text of single tokens, which {type(tokenizer).__name__} does not tell "
                f"({describe(error)}): stop by eos_token_id, or with stopping_criteria."
            ) from error
        byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        found = _vocabularies[tokenizer] = _Vocabulary(alphabet, context, byte_of)
    return found


def _alphabet(tokenizer: Any) -> Alphabet | None:
    """Whether tokens stand for bytes: all of them (GPT-2's byte-level BPE), or some beside text (SentencePiece)."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return None
    if type(decoder).__name__ == "ByteLevel":
        return "byte_level"
    try:
        kinds = set(_kinds(json.loads(decoder.__getstate__())))
    except (AttributeError, TypeError, ValueError):  # one that was written in Python
        return None
    return "byte_fallback" if "ByteFallback" in kinds else "byte_level" if "ByteLevel" in kinds else None


def _kinds(state: Any) -> Iterator[str]:
    """The types of a decoder and of all that it is made of."""
    if isinstance(state, dict):
        if isinstance(kind := state.get("type"), str):
            yield kind
        state = list(state.values())
    for part in state if isinstance(state, list) else ():
        yield from _kinds(part)
