"""What the engines are given: prompts cut from the text that ships with hf_cb, and output lengths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_cb.errors import OptionError

SHORTEST, LONGEST = 16, 768  # tokens of a prompt


@dataclass(frozen=True)
class BenchRequest:
    """One prompt and the number of tokens that every engine is to make of it; no token ends it sooner.

    `arrival`: seconds after the start at which it is submitted.
    """

    prompt: list[int]
    max_new: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests, submitted in this order: all at once, or each at its arrival."""

    name: str
    requests: list[BenchRequest]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt) for r in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(r.max_new for r in self.requests)

    @property
    def at_once(self) -> bool:
        return all(r.arrival == 0 for r in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(r.prompt) + r.max_new for r in self.requests)

    def warm_up(self) -> Workload:
        """The first four requests, four tokens each, at once."""
        few = [BenchRequest(r.prompt, min(4, r.max_new)) for r in self.requests[:4]]
        return Workload(f"{self.name} warm-up", few)


def mixed(
    tokenizer: Any,
    n: int = 64,
    seed: int = 0,
    prompt_mean: int = 128,
    out_min: int = 16,
    out_max: int = 256,
    max_len: int | None = None,
) -> Workload:
    """Prompts and outputs of many lengths, as a service sees them.

    Args:
        tokenizer: a tokenizer, or anything that is called with a text and returns its "input_ids".
        n: requests.
        prompt_mean: centre (the median) of the log-normal prompt lengths, in tokens; sigma 0.8, clipped to
            16..768.
        out_min, out_max: bounds of the uniform output lengths, in tokens.
        max_len: most tokens of a prompt and its output together; prompts are cut to leave room.

    Raises:
        OptionError: bounds that no length satisfies, or a text too short for them.
    """
    if n < 1 or prompt_mean < 1 or not 1 <= out_min <= out_max:
        raise OptionError(
            f"requests={n} and prompt_mean={prompt_mean} must be at least 1, and out_min={out_min} from 1 to "
            f"out_max={out_max}."
        )
    longest = _longest_prompt(max_len, out_max)
    ids = _text_ids(tokenizer)
    draw = random.Random(seed)
    requests, at = [], 0
    for _ in range(n):
        length = int(min(longest, max(SHORTEST, draw.lognormvariate(math.log(prompt_mean), 0.8))))
        requests.append(BenchRequest(ids[at : at + length], draw.randint(out_min, out_max)))
        at = (at + length) % (len(ids) - LONGEST)
    return Workload("mixed", requests)


def single(tokenizer: Any, prompt_len: int = 128, max_new: int = 128, max_len: int | None = None) -> Workload:
    """One request alone; lengths in tokens."""
    length = min(prompt_len, _longest_prompt(max_len, max_new))
    return Workload("single", [BenchRequest(_text_ids(tokenizer)[:length], max_new)])


def alike(tokenizer: Any, name: str, n: int, prompt_len: int, max_new: int, max_len: int | None = None) -> Workload:
    """Requests of one size, each from another place of the text; prompts are cut to leave room for outputs."""
    length = min(prompt_len, _longest_prompt(max_len, max_new, prompt_len))
    ids = _text_ids(tokenizer)
    return Workload(name, [BenchRequest(_cut(ids, i * len(ids) // n, length), max_new) for i in range(n)])


def long_prompts(tokenizer: Any, n: int = 16, max_len: int | None = None) -> Workload:
    """Long prompts with short answers: 2000 tokens and 20."""
    return alike(tokenizer, "long", n, 2000, 20, max_len)


def long_answers(tokenizer: Any, n: int = 16, max_len: int | None = None) -> Workload:
    """Short prompts with long answers: 20 tokens and 2000."""
    return alike(tokenizer, "short", n, 20, 2000, max_len)


def shared(tokenizer: Any, n: int = 64, prefix_len: int = 512, max_len: int | None = None) -> Workload:
    """Prompts with one beginning, of `prefix_len` tokens, and 32 tokens of their own; 64 tokens of output."""
    own, max_new = 32, 64
    ids = _text_ids(tokenizer)
    prefix = ids[: min(prefix_len, _longest_prompt(max_len, max_new + own, prefix_len))]
    rest = ids[len(prefix) :]
    requests = [BenchRequest(prefix + _cut(rest, i * len(rest) // n, own), max_new) for i in range(n)]
    return Workload("shared", requests)


def poisson(load: Workload, rate: float, seed: int = 0) -> Workload:
    """The same requests, arriving over time: `rate` a second on average, the first at once.

    Raises:
        OptionError: a rate that is not positive.
    """
    if not 0 < rate < math.inf:
        raise OptionError(f"rate={rate} must be a positive number of requests a second.")
    draw = random.Random(f"arrivals {seed}")
    requests, at = [], 0.0
    for request in load.requests:
        requests.append(replace(request, arrival=at))
        at += draw.expovariate(rate)
    return Workload("poisson", requests)


def shipped_text() -> str:
    """The English text that workloads are cut from."""
    return Path(__file__).with_name("text.txt").read_text(encoding="utf-8")


def _text_ids(tokenizer: Any) -> list[int]:
    # not verbose: a warning that the text is longer than the model's positions, which is as it should be
    ids = list(tokenizer(shipped_text(), verbose=False)["input_ids"])
    if len(ids) <= LONGEST:
        raise OptionError(f"The tokenizer makes only {len(ids)} tokens of the shipped text; {LONGEST + 1} are needed.")
    return ids


def _cut(ids: list[int], at: int, length: int) -> list[int]:
    """Tokens from a place on; after the last one comes the first."""
    times = -(-(at + length) // len(ids))
    return (ids * times)[at : at + length]


def _longest_prompt(max_len: int | None, max_new: int, wanted: int = LONGEST) -> int:
    longest = wanted if max_len is None else min(wanted, max_len - max_new)
    if longest < 1:
        raise OptionError(f"Outputs of {max_new} tokens leave no room for a prompt in {max_len}: ask for fewer.")
    return longest
