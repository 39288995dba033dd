"""What is submitted for a trace: prompts of its lengths, made of random tokens where nobody knows what they said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_cb.arrivals import Arrival, Trace
from hf_cb.errors import HfCbError, OptionError
from hf_cb.text.prompts import encode_prompt


@dataclass(frozen=True)
class Call:
    """One request: when, token ids, how many tokens are made of them, and `submit`'s other arguments."""

    at: float
    prompt: list[int]
    output_tokens: int
    options: Mapping[str, Any]


def make_calls(trace: Trace, vocab_size: int, seed: int = 0, tokenizer: Any = None) -> list[Call]:
    """The requests of a trace, the same for the same seed.

    A prompt that is in the trace is taken. Others are random token ids, none of the tokenizer's special ones; blocks
    with the same number are the same tokens, so that requests share what they shared.

    Raises:
        OptionError: a prompt of the trace that cannot be encoded.
    """
    special = set(getattr(tokenizer, "all_special_ids", None) or ())
    usable = np.setdiff1d(np.arange(vocab_size), np.array(sorted(special), dtype=np.int64))
    makers = _Tokens(usable, trace.hash_block, seed)
    calls = []
    for index, arrival in enumerate(trace.arrivals):
        prompt = _given(index, arrival, tokenizer) if arrival.prompt else makers.prompt(index, arrival)
        calls.append(Call(arrival.at, prompt, arrival.output_tokens, arrival.options))
    return calls


def _given(index: int, arrival: Arrival, tokenizer: Any) -> list[int]:
    try:
        ids = encode_prompt(arrival.prompt, tokenizer)
    except (HfCbError, TypeError, ValueError) as error:
        raise OptionError(f"The prompt of request {index} of the trace: {error}") from error
    return ids[: arrival.prompt_tokens] if arrival.prompt_tokens else ids


class _Tokens:
    """Random tokens by block or by request."""

    def __init__(self, usable: np.ndarray, block: int, seed: int) -> None:
        self.usable, self.block, self.seed = usable, block, seed

    def prompt(self, index: int, arrival: Arrival) -> list[int]:
        ids: list[int] = []
        for number in arrival.hash_ids[: -(-arrival.prompt_tokens // self.block)]:
            ids += self._draw(self.block, 0, number)
        del ids[arrival.prompt_tokens :]
        rest = arrival.prompt_tokens - len(ids)  # what no number stands for is nobody else's
        return ids + self._draw(rest, 1, index)

    def _draw(self, n: int, kind: int, number: int) -> list[int]:
        random = np.random.default_rng([self.seed, kind, abs(number), number < 0])
        return self.usable[random.integers(0, len(self.usable), n)].tolist()
