"""Options of one request that GenerationConfig does not have, under the names that OpenAI's and vLLM's clients use."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_cb.errors import OptionError
from hf_cb.penalties import Penalties
from hf_cb.values import flag, is_number, is_whole


@dataclass(frozen=True)
class OwnOptions:
    """What a request asks beside its GenerationConfig; None and an option that is not given are the same.

    Args:
        presence_penalty: taken from the score of each token that the output has, once (OpenAI's meaning).
        frequency_penalty: the same, as often as the output has the token.
        logit_bias: token id, also as a string, to what is added to its score: `{"42": -100}`.
        ignore_eos: no end-of-sequence token ends the request (vLLM's name).
        skip_special_tokens: leave special tokens out of text, in results and in deltas.
        truncate_prompt_tokens: how many of the prompt's last tokens are kept; -1: as many as the model's length leaves
            room for (vLLM's name and meaning).
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    @classmethod
    def take(cls, options: dict[str, Any], vocab_size: int) -> OwnOptions:
        """Takes its options out of the given ones.

        Raises:
            OptionError: one has a wrong type or value, by its name.
        """
        given = {n: options.pop(n) for n in cls.__dataclass_fields__ if n in options}
        checked: dict[str, Any] = {
            name: _CHECKS[name](name, value, vocab_size) for name, value in given.items() if value is not None
        }
        return cls(**checked)

    @property
    def penalties(self) -> Penalties | None:
        """The first three; None if they change nothing."""
        found = Penalties(bias=self.logit_bias, presence=self.presence_penalty, frequency=self.frequency_penalty)
        return None if found == Penalties() else found

    def truncated(self, prompt_ids: list[int], room: int) -> list[int]:
        """What is kept of a prompt. `room`: tokens that the model's length leaves for it."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return prompt_ids
        return prompt_ids[-(max(1, room) if keep == -1 else keep) :]


_MOST = 3.4e38  # what float32 can hold, which scores are


def _number(name: str, value: Any, vocab_size: int) -> float:
    if not is_number(value) or not abs(value) <= _MOST:
        raise OptionError(f"{name} must be a finite number in float32, not {value!r}.")
    return float(value)


def _flag(name: str, value: Any, vocab_size: int) -> bool:
    return flag(name, value)


def _length(name: str, value: Any, vocab_size: int) -> int:
    if not is_whole(value) or not (value >= 1 or value == -1):
        raise OptionError(
            f"{name} must be a whole number of tokens, at least 1, or -1 for as many as fit, not {value!r}."
        )
    return operator.index(value)


def _bias(name: str, value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must be a dict of token ids and numbers, not {value!r}.")
    found: dict[int, float] = {}
    for key, amount in value.items():
        try:
            token = int(key) if isinstance(key, str) else operator.index(key)
        except (TypeError, ValueError):
            token = -1
        if isinstance(key, bool) or not 0 <= token < vocab_size:
            raise OptionError(f"{name} has {key!r}, which is not a token id of this model (0 to {vocab_size - 1}).")
        if token in found:
            raise OptionError(f"{name} has token {token} twice, as a number and as a string.")
        found[token] = _number(f"{name}[{key!r}]", amount, vocab_size)
    return tuple(found.items())


_CHECKS = {
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _bias,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "truncate_prompt_tokens": _length,
}
