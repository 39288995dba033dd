"""The text of an answer: at once, or as it grows, which comes to the same; cut at its stop string where that is asked.

A growing text is held back from the token on in which a stop string may begin, so what was given never has to be taken
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING

from hf_cb.text.detokenizer import Detokenizer, decode
from hf_cb.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rendering:
    """How one request's token ids become text. `cut_at`: the stop strings that are no part of it."""

    tokenizer: PreTrainedTokenizerBase
    cut_at: StopStrings | None = None
    skip_special_tokens: bool = True

    def text(self, prompt_ids: Sequence[int], token_ids: Sequence[int], stop_reason: str | int | None) -> str:
        """An answer's whole text."""
        match = None
        if self.cut_at is not None and isinstance(stop_reason, str):
            match = self.cut_at.match([*prompt_ids[-self.cut_at.reach :], *token_ids])
        if match is None:
            return self._decode(token_ids)
        token = match.token - len(prompt_ids[-self.cut_at.reach :]) if self.cut_at is not None else 0
        if token < 0:
            return ""
        before = self._decode(token_ids[:token])
        if not match.offset:
            return before
        text = self._decode(token_ids[: token + 1])
        # what both begin with is what a reader may have been given
        return text[: max(len(text) - match.rest, len(commonprefix([before, text])))]

    def reader(self, prompt_ids: Sequence[int]) -> TextReader:
        return TextReader(self, prompt_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return decode(self.tokenizer, token_ids, self.skip_special_tokens)


class TextReader:
    """One answer's text as its tokens come: pieces that together are `Rendering.text`. One thread at a time."""

    def __init__(self, rendering: Rendering, prompt_ids: Sequence[int]) -> None:
        self._rendering = rendering
        self._cut_at = rendering.cut_at
        self._prompt = list(prompt_ids[-self._cut_at.reach :]) if self._cut_at is not None else []
        self._ids: list[int] = []
        self._told = 0  # how many of them the detokenizer has
        self._detokenizer = Detokenizer(rendering.tokenizer, rendering.skip_special_tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids and returns the text that has become final, possibly ""."""
        if self._cut_at is None:
            return self._detokenizer.push(token_ids)
        self._ids += token_ids
        newest = self._prompt + self._ids if len(self._ids) < self._cut_at.reach else self._ids
        return self._tell(max(self._told, len(self._ids) - self._cut_at.waiting(newest)))

    def end(self, stop_reason: str | int | None) -> str:
        """The rest of the text."""
        if self._cut_at is not None and isinstance(stop_reason, str):
            return self._rendering.text(self._prompt, self._ids, stop_reason)[len(self._detokenizer.text) :]
        return self._tell(len(self._ids)) + self._detokenizer.flush()

    def _tell(self, upto: int) -> str:
        new, self._told = self._ids[self._told : upto], upto
        return self._detokenizer.push(new)
