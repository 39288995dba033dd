"""`generate`'s four common warpers as plain numbers, and common processors too: a sampler that knows them need not call
transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_cb.penalties import Penalties


@dataclass(frozen=True)
class Warpers:
    """In the order in which they are applied. The defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class TokenBiases(LogitsProcessor):
    """logit_bias, presence_penalty and frequency_penalty as OpenAI defines them, for one request: one number is added
    to each token's score. In `penalties` nothing else is looked at."""

    def __init__(self, penalties: Penalties, prompt_length: int) -> None:
        self.penalties = penalties
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        bias = dict(self.penalties.bias)
        counts = dict.fromkeys(bias, 0)
        if self.penalties.presence or self.penalties.frequency:
            for token in input_ids[0, self.prompt_length :].tolist():
                counts[token] = counts.get(token, 0) + 1
        tokens = input_ids.new_tensor(list(counts))
        amounts = [self.penalties.amount(bias.get(token, 0.0), count) for token, count in counts.items()]
        return scores.index_add(1, tokens, scores.new_tensor([amounts]))


Step = Callable[[Any, Penalties, int], Penalties | None]


def _ban(found: Penalties, tokens: Iterable[int], before: int | None = None) -> Penalties:
    tokens = tuple(token for token in tokens if 0 <= token < 2**31)  # others are in no vocabulary, and in no int32
    if before is None:
        return replace(found, banned=(*found.banned, *tokens))
    entry = (before, tokens)  # min_new_tokens comes as min_length too
    return replace(found, banned_before=tuple(dict.fromkeys((*found.banned_before, entry))))


def _repetition(p: Any, found: Penalties, prompt_length: int) -> Penalties | None:
    return None if p.prompt_ignore_length is not None else replace(found, repetition=p.penalty)


def _bad_words(p: Any, found: Penalties, prompt_length: int) -> Penalties | None:
    words = list(p.sequence_bias)
    return _ban(found, [word[0] for word in words]) if all(len(word) == 1 for word in words) else None


def _min_length(p: Any, found: Penalties, prompt_length: int) -> Penalties | None:
    return _ban(found, p.eos_token_id.tolist(), p.min_length)


def _min_new_tokens(p: Any, found: Penalties, prompt_length: int) -> Penalties | None:
    return _ban(found, p.eos_token_id.tolist(), p.prompt_length_to_skip + p.min_new_tokens)


def _suppress(p: Any, found: Penalties, prompt_length: int) -> Penalties | None:
    return _ban(found, p.suppress_tokens.tolist())


def _suppress_first(p: Any, found: Penalties, prompt_length: int) -> Penalties | None:
    same = p.begin_index == prompt_length
    return _ban(found, p.begin_suppress_tokens.tolist(), prompt_length + 1) if same else None


def _biases(p: Any, found: Penalties, prompt_length: int) -> Penalties | None:
    own = p.penalties
    return replace(found, bias=own.bias, presence=own.presence, frequency=own.frequency)


# in the order in which `generate` has them
_PENALTIES: dict[type, Step] = {
    RepetitionPenaltyLogitsProcessor: _repetition,
    NoBadWordsLogitsProcessor: _bad_words,
    MinLengthLogitsProcessor: _min_length,
    MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    SuppressTokensLogitsProcessor: _suppress,
    SuppressTokensAtBeginLogitsProcessor: _suppress_first,
    TokenBiases: _biases,
}
_WARPERS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_ORDER = [*_PENALTIES, *_WARPERS]


def as_numbers(processors: Iterable[Any], prompt_length: int) -> tuple[Penalties, Warpers] | None:
    """What these processors do to the scores of a request with this prompt, or None if it is more than penalties and
    the four warpers do in their usual order."""
    penalties: Penalties | None = Penalties()
    warpers, rest = Warpers(), _ORDER
    for processor in processors:
        kind = type(processor)
        if kind not in rest:
            return None
        rest = rest[rest.index(kind) + 1 :]
        if kind in _PENALTIES:
            penalties = _PENALTIES[kind](processor, penalties or Penalties(), prompt_length)
            if penalties is None:
                return None
            continue
        name = _WARPERS[kind]
        usual = getattr(processor, "filter_value", -float("inf")) == -float("inf")
        if not usual or (name != "top_k" and getattr(processor, "min_tokens_to_keep", 1) != 1):
            return None
        warpers = replace(warpers, **{name: getattr(processor, name)})
    assert penalties is not None
    return penalties, warpers
