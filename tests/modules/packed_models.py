"""What tests of packed models share: some prompts, their tokens in a batch and alone, and calls that fail once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tiny_models import generate_alone, greedy, make_prompts

PROMPTS = make_prompts([30, 5, 17])


def tokens(model: Any, **options: Any) -> list[list[int]]:
    return [r.generated_tokens for r in model.generate_batch(PROMPTS, greedy(8), **options).values()]


def alone(model: Any) -> list[list[int]]:
    return [generate_alone(model, p, greedy(8)) for p in PROMPTS]


def failing_at(number: int, error: BaseException, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose call of that number raises the error instead."""
    calls = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise error
        return function(*args, **kwargs)

    return call
