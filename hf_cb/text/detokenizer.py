"""Token ids to text, a few tokens at a time, with nothing lost, doubled or cut in half."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hf_cb.text.tokenizers import tokenizer_lock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 16
"""Tokens decoded together before the window is cut to its newest half."""
_AGREEMENT = 4
"""Characters in which a shorter window must agree with the longer one: a character has at most 4 bytes."""
_EAGER = 256
"""From this length on, a window that cannot be cut is decoded only each time it has doubled."""
_CLEANUP_INNER = " 'nvr"
"""Every character that is not the last one in a pattern of `clean_up_tokenization` (" n't", " 've", ...)."""


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
    """`tokenizer.decode` of all the ids at once, safe for a tokenizer that threads share."""
    with tokenizer_lock(tokenizer):
        text = tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str)
    return text


class Detokenizer:
    """The text of one growing token sequence.

    For any split of the ids into pushes, the pushed texts and the flush together equal
    `decode(tokenizer, ids, skip_special_tokens)`. The prompt is no part of it, so none of its text comes out.

    Text that is given stays, so some has to wait: bytes that may still become a character, and spaces that a
    tokenizer's clean-up may still remove. A run of byte tokens (`<0xE3>`) waits for its end, since one
    invalid byte turns the whole run into replacement characters. The cost is linear in the number of tokens.

    An object belongs to one thread at a time; the tokenizer may be shared.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._lock = tokenizer_lock(tokenizer)
        self._cleanup = _Cleanup(tokenizer) if _cleans_up(tokenizer) else None
        self._decode_kwargs: dict[str, bool] = {"skip_special_tokens": skip_special_tokens}
        if self._cleanup is not None:
            self._decode_kwargs["clean_up_tokenization_spaces"] = False
        self._skip_special_tokens = skip_special_tokens
        self._kinds: dict[int, str] = {}
        self._ids: list[int] = []
        self._window: list[int] = []  # the newest ids, as context for the next ones
        self._window_text = ""  # the part of the window's text that has been given
        self._window_limit = _WINDOW
        self._byte_run: list[int] = []  # byte tokens behind the window whose run has not ended
        self._texts: list[str] = []
        self._flushed = False

    @property
    def text(self) -> str:
        """All text given so far."""
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that has become final, possibly "".

        Raises:
            RuntimeError: After `flush`.
        """
        if self._flushed:
            raise RuntimeError("push after flush: a sequence that was flushed takes no more tokens")
        if not self._extend_window(token_ids):
            return ""
        if self._window_limit > _EAGER and len(self._window) < self._window_limit:
            return ""
        return self._give(self._cleanup.push(self._new_text()) if self._cleanup else self._new_text())

    def flush(self) -> str:
        """The rest of the text, incomplete bytes as `tokenizer.decode` shows them. Later calls give ""."""
        if self._flushed:
            return ""
        self._flushed = True
        given = self.text
        return self._give(decode(self._tokenizer, self._ids, self._skip_special_tokens)[len(given) :])

    def _give(self, text: str) -> str:
        if text:
            self._texts.append(text)
        return text

    def _extend_window(self, token_ids: Iterable[int]) -> bool:
        """Sorts the ids into the window and the open byte run; False if the window is as before."""
        size = len(self._window)
        for token_id in map(int, token_ids):
            self._ids.append(token_id)
            kind = self._kinds.get(token_id) or self._classify(token_id)
            if kind == "byte":
                self._byte_run.append(token_id)
            elif kind == "text":
                self._window += self._byte_run
                self._window.append(token_id)
                self._byte_run.clear()
        return len(self._window) > size

    def _classify(self, token_id: int) -> str:
        """Names an id "byte", "text", or "none": left out by decoding, so that it ends no byte run either."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None or self._is_skipped(token_id):
            kind = "none"
        else:
            kind = "byte" if _BYTE_TOKEN.fullmatch(str(token)) else "text"
        self._kinds[token_id] = kind
        return kind

    def _is_skipped(self, token_id: int) -> bool:
        # Asked of decode itself: fast tokenizers, slow ones and others list special tokens differently.
        return (
            self._skip_special_tokens
            and not self._decode([token_id])
            and bool(decode(self._tokenizer, [token_id], skip_special_tokens=False))
        )

    def _decode(self, token_ids: list[int]) -> str:
        with self._lock:
            text = self._tokenizer.decode(token_ids, **self._decode_kwargs)
        assert isinstance(text, str)
        return text

    def _new_text(self) -> str:
        """Decodes the window and returns what is final and new in it."""
        text = self._decode(self._window)
        # A replacement character at the end may be a character whose last bytes are to come.
        final = text.removesuffix(_REPLACEMENT)
        if not final.startswith(self._window_text):
            # This decoder changed what it gave before. It may come back to it; `flush` has the last word.
            self._window_limit = max(self._window_limit, 2 * len(self._window))
            return ""
        new = final[len(self._window_text) :]
        self._window_text = final
        self._cut_window(text)
        return new

    def _cut_window(self, text: str) -> None:
        """Keeps the newest half of a full window if it decodes to the end of `text`, the whole window's text.

        The first characters of a shorter window may differ (a leading space, bytes of a cut character);
        agreement further on shows that this has no influence on what follows. Without it, the window doubles.
        """
        waiting = len(text) - len(self._window_text)
        agreement = _AGREEMENT + waiting
        while len(self._window) >= self._window_limit:
            newest = self._window[-(self._window_limit // 2) :]
            newest_text = self._decode(newest)
            if len(newest_text) >= agreement and text.endswith(newest_text[-agreement:]):
                self._window = newest
                self._window_text = newest_text[: len(newest_text) - waiting]
                self._window_limit = _WINDOW
                return
            self._window_limit *= 2


class _Cleanup:
    """`clean_up_tokenization` (" ." to "." and the like) over a text that comes in pieces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._clean = tokenizer.clean_up_tokenization
        self._waiting: list[str] = []

    def push(self, text: str) -> str:
        # No pattern can reach across the end of a character that is never inside one.
        end = len(text.rstrip(_CLEANUP_INNER))
        if end == 0:
            self._waiting.append(text)
            return ""
        ready = "".join([*self._waiting, text[:end]])
        self._waiting = [text[end:]]
        return self._clean(ready)


def _cleans_up(tokenizer: Any) -> bool:
    """Whether `tokenizer.decode` ends with `clean_up_tokenization`; transformers omits it for a fast BPE."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return backend is None or type(backend.model).__name__ != "BPE" or forced
