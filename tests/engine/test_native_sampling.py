"""Rows that need none of transformers' processors: which ones these are, and that their tokens are the same."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from cpu_variants import needs_library
from tiny_models import make_model
from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper

from hf_cb.core import Request
from hf_cb.engine.penalising import penalised
from hf_cb.engine.sampler import Sampled, Sampler, edits_of
from hf_cb.options.recipe import make_recipe
from hf_cb.penalties import Edits, Penalties, TokenCounts
from hf_cb.steps import PlanPart
from hf_cb.warpers import Warpers

EDITS: dict[str, Any] = {  # for a model whose eos_token_id is 2
    "repetition_penalty": ({"repetition_penalty": 1.2}, Penalties(repetition=1.2)),
    "bad_words_ids": ({"bad_words_ids": [[3], [2], [5]]}, Penalties(banned=(3, 5))),
    "min_length": ({"min_length": 9}, Penalties(banned_before=((9, (2,)),))),
    "min_new_tokens": ({"min_new_tokens": 3}, Penalties(banned_before=((5, (2,)),))),
    "suppress_tokens": ({"suppress_tokens": [7, 8]}, Penalties(banned=(7, 8))),
    "begin_suppress_tokens": ({"begin_suppress_tokens": [7]}, Penalties(banned_before=((3, (7,)),))),
    "logit_bias": ({"logit_bias": {"3": 4, 5: -1.5}}, Penalties(bias=((3, 4.0), (5, -1.5)))),
    "presence_penalty": ({"presence_penalty": 1}, Penalties(presence=1.0)),
    "frequency_penalty": ({"frequency_penalty": -0.5}, Penalties(frequency=-0.5)),
}
ALL_EDITS = {name: value for options, _ in EDITS.values() for name, value in options.items()}
MIXES = (
    {},
    *(options for options, _ in EDITS.values()),
    ALL_EDITS,
    {"do_sample": False, **ALL_EDITS},
    {"do_sample": False, "repetition_penalty": 0.7, "frequency_penalty": 2.0},
    {"temperature": 1.3, "top_k": 0, "top_p": 0.9, "min_p": 0.02, **ALL_EDITS},
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


def test_only_penalties_and_the_four_warpers_are_recognised(model) -> None:
    def warpers(**options) -> Warpers | None:
        return make_request(model, 1, [1, 2], **options).params.warpers

    assert warpers(top_k=0) == Warpers()
    assert warpers(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1) == Warpers(0.5, 7, 0.9, 0.1)
    for more in (
        {"typical_p": 0.9},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3, 4]]},
        {"sequence_bias": [[[3], 2.0]]},
        {"repetition_penalty": 1.2, "guidance_scale": 2.0},
        {"renormalize_logits": True},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [1]},
        {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])},
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
            request.token_ids += [(5 * i + j) % 11 for j in range(step % 4)]
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


@pytest.mark.parametrize("name", EDITS)
def test_penalties_are_recognised_greedy_or_not(model, name: str) -> None:
    options, penalties = EDITS[name]
    for do_sample in (True, False):
        params = make_request(model, 1, [1, 2], do_sample=do_sample, top_k=0, **options).params
        assert params.penalties == penalties and params.warpers == Warpers()


def test_penalised_scores_are_those_of_the_processors_bit_for_bit(model) -> None:
    """As a request grows, and with drafts."""
    generator = torch.Generator().manual_seed(0)
    mixes = [*(options for options, _ in EDITS.values()), ALL_EDITS, {}]
    requests = [make_request(model, i, [1, 2, 88], do_sample=False, **mix) for i, mix in enumerate(mixes)]
    for step in range(8):
        parts = [PlanPart(r, 0, 1, samples=2, drafts=[step]) for r in requests]
        rows = [(part, i) for part in parts for i in range(2)]
        logits = torch.randn(len(rows), 90, generator=generator) * 4
        got = penalised(logits, [edits_of(part, i) for part, i in rows])
        for row, (part, i) in enumerate(rows):
            ids = torch.tensor([part.request.token_ids + part.drafts[:i]])
            process = part.request.params.process
            want = process(ids, logits[row][None])[0] if process else logits[row]
            assert torch.equal(got[row], want), (part.request.request_id, step, i)
        for r in requests:
            r.token_ids.append(step % 5)


def test_tokens_that_the_scores_do_not_have_are_passed_over() -> None:
    """A head may be smaller than the embedding of the prompt's ids."""
    ints, numbers = array("i", [0, 9, -1]), array("f", [1.5, 1.0, 1.0])
    none = (array("i"), array("f"))
    for edits, want in (
        (Edits(2.0, ints, none[0], *none), 2.0),
        (Edits(1.0, none[0], ints, *none), float("-inf")),
        (Edits(1.0, none[0], none[0], ints, numbers), 5.5),
    ):
        assert penalised(torch.tensor([[1.0, 4.0], [4.0, 4.0]]), [None, edits]).tolist() == [[1.0, 4.0], [want, 4.0]]


def test_counts_that_grow_are_those_counted_at_once() -> None:
    penalties = Penalties(1.3, bias=((4, 2.0), (6, -1.0)), presence=0.5, frequency=0.25, banned_before=((6, (2,)),))
    ids, growing = [3, 4, 3, 5], TokenCounts(penalties, 2)
    for token in (4, 4, 7, 3, 4):
        drafted = growing.edits(ids, [9, 4])
        assert sets(drafted) == sets(TokenCounts(penalties, 2).edits([*ids, 9, 4]))
        assert sets(growing.edits(ids)) == sets(TokenCounts(penalties, 2).edits(ids))
        ids.append(token)
    found = sets(growing.edits(ids))
    assert found[1] == {3, 4, 5, 7} and found[3] == {3: -1.0, 4: 0.75, 5: -0.75, 6: -1.0, 7: -0.75}


def sets(edits: Edits) -> tuple[Any, ...]:
    assert len(set(edits.repeated)) == len(edits.repeated) and len(set(edits.added)) == len(edits.added)
    amounts = dict(zip(edits.added, edits.amounts, strict=True))
    return edits.repetition, set(edits.repeated), set(edits.banned), amounts


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
