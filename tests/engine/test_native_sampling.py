"""Rows that need none of transformers' processors: which ones these are, and that their tokens are the same."""

from __future__ import annotations

import pytest
import torch
from cpu_variants import needs_library
from tiny_models import make_model
from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper

from hf_cb.core import Request
from hf_cb.engine.sampler import Sampled, Sampler
from hf_cb.models.generation import make_recipe
from hf_cb.steps import PlanPart
from hf_cb.warpers import Warpers

MIXES = (
    {},
    {"temperature": 0.7},
    {"top_k": 0},
    {"top_k": 5, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 0, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.5, "top_k": 3},
    {"do_sample": False},
)


@pytest.fixture(scope="module")
def model():
    return make_model()


def make_request(model, number: int, prompt: list[int], logprobs: bool = True, **options) -> Request:
    options = {"do_sample": True, "max_new_tokens": 4, "seed": number, **options}
    recipe = make_recipe(model, None, options, tokenizer=None, default_length=20, logprobs=logprobs)
    return Request(f"r{number}", prompt, recipe.for_prompt(prompt))


def test_only_the_four_warpers_are_recognised(model) -> None:
    def warpers(**options) -> Warpers | None:
        return make_request(model, 1, [1, 2], **options).params.warpers

    assert warpers(top_k=0) == Warpers()
    assert warpers(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1) == Warpers(0.5, 7, 0.9, 0.1)
    for more in (
        {"repetition_penalty": 1.2},
        {"typical_p": 0.9},
        {"no_repeat_ngram_size": 2},
        {"renormalize_logits": True},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [1]},
        {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])},
        {"do_sample": False},
    ):
        assert warpers(**more) is None, more


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_processors(model, dtype) -> None:
    """Also where a request verifies drafts, and beside rows that do need processors."""
    torch.manual_seed(0)
    for step in range(20):
        parts = []
        for i, mix in enumerate(MIXES * 3):
            request = make_request(model, 100 * step + i, list(range(1, 3 + i)), logprobs=i % 2 == 0, **mix)
            drafts = [4] * (i % 3)
            parts.append(PlanPart(request, 0, 1, samples=1 + len(drafts), drafts=drafts))
        logits = (torch.randn(sum(p.samples for p in parts), 300) * 3).to(dtype)
        got, want = Sampler().sample(logits, parts), Sampler(native=False).sample(logits, parts)
        if dtype == torch.bfloat16:  # with ties, among which the top-p warper's sort chooses as it likes
            got, want = ([r for r, p in zip(x, parts, strict=True) if not cuts(p)] for x in (got, want))
        for a, b in zip(sum(got, []), sum(want, []), strict=True):
            assert a.token_id == b.token_id
            assert (a.logprob is None) == (b.logprob is None)
            assert a.logprob is None or a.logprob == pytest.approx(b.logprob, abs=2e-5)


def cuts(part: PlanPart) -> bool:
    return part.request.params.warpers is not None and part.request.params.warpers.top_p < 1


@needs_library
def test_rows_fail_alone_and_say_why(model) -> None:
    logits = torch.zeros(4, 9)
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    logits[3, 5] = 100.0
    parts = [PlanPart(make_request(model, i, [1, 2], logprobs=False), 0, 1, samples=1) for i in range(4)]
    good, nan, none, sure = (row[0] for row in Sampler().sample(logits, parts))
    assert good.exception is None and sure == Sampled(5)
    assert "NaN" in str(nan.exception) and "above zero" in str(none.exception)


def test_a_generation_configs_settings_are_recognised(model) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    recipe = make_recipe(model, config, {}, tokenizer=None, default_length=20)
    assert recipe.for_prompt([1, 2]).warpers == Warpers(0.6, 20, 0.95)
