"""First tokens drawn with many seeds against the probabilities that `generate`'s own processors give, by chi-square."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import sampling_examples as examples
import torch
from option_cases import SAMPLERS, TOKENIZER, generated, options_of, prompt_of
from tiny_models import make_model
from transformers import PreTrainedModel

from hf_cb.core import Request
from hf_cb.options.recipe import Recipe, make_recipe
from hf_cb.steps import PlanPart

NAMES = sorted(examples.ALL)
LIKELY = 1e-6  # by chance a test falls below once in a million times; and the seeds are fixed
BATCHED, BY_ROW = 4000, 300  # draws


@functools.cache
def model() -> PreTrainedModel:
    """With logits so flat that many tokens have a chance."""
    small = make_model(num_hidden_layers=2)
    with torch.no_grad():
        small.get_output_embeddings().weight *= 0.5
    return small


def probabilities(name: str) -> torch.Tensor:
    """Of the first token, `[V]` float64, as `generate` has them."""
    given = options_of(name, True) | dict(num_return_sequences=1)
    out = generated(model(), prompt_of(name), given, output_scores=True, return_dict_in_generate=True)
    return out.scores[0][0].double().softmax(-1)


def recipe_of(name: str) -> Recipe:
    return make_recipe(model(), None, options_of(name, True), tokenizer=TOKENIZER, default_length=64)


def draws(name: str, way: str) -> torch.Tensor:
    """How often each token was drawn, `[V]`, each time with another seed."""
    recipe = recipe_of(name)
    prompt = recipe.truncated(prompt_of(name))
    params = recipe.for_prompt(prompt)
    count = BATCHED if params.warpers is not None and way == "native" else BY_ROW
    requests = []
    for seed in range(count):  # what keeps a state is made anew for each
        own = replace(params, seed=seed) if params.takes_drafts else recipe.for_prompt(prompt, seed)
        requests.append(Request(f"r{seed}", prompt, own))
    with torch.no_grad():
        logits = model()(torch.tensor([prompt])).logits[0, -1].repeat(count, 1)
        found = SAMPLERS[way]().sample(logits, [PlanPart(r, 0, 1, samples=1) for r in requests])
    found = found if isinstance(found, list) else found.read()
    assert not any(row[0].exception for row in found)
    return torch.bincount(torch.tensor([row[0].token_id for row in found]), minlength=len(logits[0]))


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's chi-square; tokens expected fewer than five times are counted together."""
    many = expected >= 5
    seen = torch.cat([counts[many].double(), counts[~many].sum()[None]])
    due = torch.cat([expected[many], expected[~many].sum()[None]])
    if due[-1] < 1e-9:
        seen, due = seen[:-1], due[:-1]
    freedom = torch.tensor((len(due) - 1) / 2, dtype=torch.float64)
    statistic = ((seen - due) ** 2 / due).sum()
    return float(torch.special.gammaincc(freedom, statistic / 2)) if len(due) > 1 else 1.0


@pytest.mark.parametrize("name", NAMES)
def test_draws_have_generates_probabilities(name: str, way: str = "native") -> None:
    expected, counts = probabilities(name), draws(name, way)
    assert not counts[expected == 0].any(), "what is excluded was drawn"
    assert p_value(counts, expected * counts.sum()) > LIKELY


def test_draws_on_a_device_too() -> None:
    """What is batched there: penalties in torch, and then the device's own way to draw."""
    batched = [n for n in NAMES if recipe_of(n).for_prompt(prompt_of(n)).warpers is not None]
    assert len(batched) > 20
    for name in batched:
        test_draws_have_generates_probabilities(name, "device")


def test_the_measure_sees_another_temperature() -> None:
    expected = probabilities("temperature")
    counts = draws("do_sample", "native")
    assert p_value(counts, expected * counts.sum()) < LIKELY


def test_without_a_seed_draws_are_independent() -> None:
    """Requests of one recipe draw seeds of their own: their tokens follow the probabilities, and neighbours differ as
    often as independent ones do."""
    torch.manual_seed(0)
    given = options_of("do_sample", True) | dict(seed=None, top_k=0)
    recipe = make_recipe(model(), None, given, tokenizer=None, default_length=64)
    prompt = prompt_of("do_sample")
    requests = [Request(f"r{i}", prompt, recipe.for_prompt(prompt)) for i in range(2000)]
    with torch.no_grad():
        logits = model()(torch.tensor([prompt])).logits[0, -1]
    found = SAMPLERS["native"]().sample(logits.repeat(2000, 1), [PlanPart(r, 0, 1, samples=1) for r in requests])
    tokens = torch.tensor([row[0].token_id for row in found])
    expected = logits.double().softmax(-1)
    assert p_value(torch.bincount(tokens, minlength=len(logits)), expected * 2000) > LIKELY
    same = float((tokens[1:] == tokens[:-1]).double().mean())
    due = float((expected**2).sum())
    assert abs(same - due) < 5 * (due / 2000) ** 0.5
