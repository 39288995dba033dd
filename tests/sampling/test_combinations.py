"""Random combinations of options: each request's result alone is its result in one batch of all of them."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import sampling_examples as examples
from option_cases import generated_tokens, manager_of, other_prompts, told
from tiny_models import make_model
from transformers import PreTrainedModel

pytestmark = [pytest.mark.usefixtures("patched"), pytest.mark.filterwarnings("ignore:Unfeasible length")]
COUNT = 200
LENGTHS = {"max_length", "max_new_tokens"}


@functools.cache
def model() -> PreTrainedModel:
    return make_model(num_hidden_layers=2)


@functools.cache
def cases() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts, and the options of one to six examples together."""
    rng = random.Random(0)
    found = []
    for i, prompt in enumerate(other_prompts(COUNT, seed=3)):
        options: dict[str, Any] = dict(max_new_tokens=rng.randint(1, 7), eos_token_id=-1, seed=i)
        for name in rng.sample(sorted(set(examples.ALL) - LENGTHS), rng.randint(1, 6)):
            options |= examples.ALL[name]
        if "exponential_decay_length_penalty" in options:
            options.pop("ignore_eos", None)  # it is about that token
        if "min_new_tokens" in options:
            options["max_new_tokens"] = 7
        options["do_sample"] = rng.random() < 0.6 or "num_return_sequences" in options
        found.append((prompt, options))
    return found


@functools.cache
def alone() -> list[list[tuple[Any, ...]]]:
    with manager_of(model(), "native", num_blocks=200) as manager:
        return [told(manager.submit(prompt, **options).outputs()) for prompt, options in cases()]


@pytest.mark.parametrize("way", ["native", "overlap", "device"])
def test_alone_and_in_the_batch(way: str) -> None:
    with manager_of(model(), way, max_batch_tokens=64, max_num_seqs=64, block_size=2, num_blocks=40) as manager:
        with manager.pause():  # all begin together
            handles = [manager.submit(prompt, **options) for prompt, options in cases()]
        results = [told(handle.outputs()) for handle in handles]
        preemptions = sum(r.metrics.preemptions for h in handles for r in h.mailbox.requests)
    manager.engine.check_idle()
    differing = [i for i in range(COUNT) if results[i] != alone()[i]]
    assert not differing, [cases()[i] for i in differing[:3]]
    assert preemptions > 0
    assert sum(r[0][3] is None for r in results) > 0.9 * COUNT, "few were meant to leave no token at all"


def test_greedy_combinations_are_generates() -> None:
    for (prompt, options), found in zip(cases(), alone(), strict=True):
        if not options["do_sample"] and found[0][3] is None:
            assert found[0][0] == generated_tokens(model(), prompt, options), options
