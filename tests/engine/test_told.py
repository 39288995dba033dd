"""What sampled rows tell besides their tokens, the same from the sampler of a CPU and from that of a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import make_model
from torch import Tensor

from hf_cb.core import Request
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.logprobs import split
from hf_cb.engine.sampler import Drawing, Sampled, Sampler
from hf_cb.models.drawing import Settings
from hf_cb.options.recipe import make_recipe
from hf_cb.steps import Drawn, PlanPart

PLAIN: dict[str, Any] = {"do_sample": False}
WARPED: dict[str, Any] = {"do_sample": True, "top_k": 6, "temperature": 1.7, "top_p": 0.9}
OTHER: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.8}
ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": True},
    {"logprobs": 4},
    {"logprobs": 4, "logprobs_mode": "raw_logprobs"},
    {"logprobs": 0, "output_scores": True},
    {"logprobs": 2, "logprobs_mode": "raw_logprobs", "output_scores": True, "output_logits": True},
    {"output_logits": True},
]


@pytest.fixture(scope="module")
def model():
    return make_model()


def make_parts(model: Any, kinds: list[dict[str, Any]]) -> list[PlanPart]:
    parts = []
    for i, (kind, asked) in enumerate([(kind, asked) for asked in ASKED for kind in kinds]):
        prompt = list(range(3, 6 + i % 4))
        options = {"max_new_tokens": 4, "seed": i, **kind, **asked}
        recipe = make_recipe(model, None, options, tokenizer=None, default_length=20)
        drafts = [7] * (i % 3)
        parts.append(PlanPart(Request(f"r{i}", prompt, recipe.for_prompt(prompt)), 0, 1, 1 + len(drafts), drafts))
    return parts


def first_kept(logits: Tensor, settings: Settings) -> Drawn:
    """Stands in for a device's kernel: the best token, and no log-probability worth having."""
    return Drawn(logits.argmax(-1), torch.full((len(logits),), -0.5))


def flat(found: list[list[Sampled]] | Drawing) -> list[Sampled]:
    return sum(found.read() if isinstance(found, Drawing) else found, [])


@pytest.mark.parametrize("kinds", [[PLAIN], [PLAIN, WARPED], [PLAIN, WARPED, OTHER], [WARPED], [OTHER]])
@pytest.mark.parametrize("make", [Sampler, lambda: Sampler(native=False), lambda: DeviceSampler(first_kept)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_tell_what_is_asked(model, kinds, make, dtype) -> None:
    parts = make_parts(model, kinds)
    torch.manual_seed(3)
    logits = (torch.randn(sum(p.samples for p in parts), 128) * 3).to(dtype)
    before = logits.clone()
    results = flat(make().sample(logits, parts))
    assert torch.equal(logits, before)
    logits.zero_()  # a recorded step writes there again
    rows = [(p, p.request.token_ids + p.drafts[:i]) for p in parts for i in range(p.samples)]
    for (part, ids), result, row in zip(rows, results, before.float(), strict=True):
        params, token = part.request.params, result.token_id
        scores = row if params.process is None else params.process(torch.tensor([ids]), row[None].clone())[0]
        assert (result.logits is None, result.scores is None) == (not params.output_logits, not params.output_scores)
        assert result.logits is None or torch.equal(result.logits, row)
        assert result.scores is None or torch.equal(result.scores, scores)
        assert (result.logprob is None, result.top is None) == (not params.logprobs, params.top_logprobs is None)
        want = (row if params.raw_logprobs else scores).log_softmax(-1)
        if result.top is None:
            continue
        assert result.logprob == result.top[token] == pytest.approx(float(want[token]), abs=1e-4)
        best = [v for v in want.topk(params.top_logprobs).values.tolist() if v > -float("inf")]
        assert list(result.top.values())[: len(best)] == pytest.approx(best, abs=1e-4)
        assert len(result.top) <= len(best) + 1


def test_a_row_without_a_token_tells_nothing_and_the_next_one_does(model) -> None:
    parts = make_parts(model, [PLAIN])[2:4]
    logits = torch.randn(sum(p.samples for p in parts), 128)
    logits[0, 5] = float("nan")
    for sampler in (Sampler(), Sampler(native=False), DeviceSampler()):
        results = flat(sampler.sample(logits, parts))
        assert "NaN" in str(results[0].exception) and results[0].top is None
        assert all(len(r.top) == 4 and r.exception is None for r in results[1:])


def test_only_tokens_are_enough_only_where_nothing_is_told(model) -> None:
    for asked in ASKED:
        recipe = make_recipe(model, None, PLAIN | asked, tokenizer=None, default_length=20)
        part = PlanPart(Request("r", [3, 4], recipe.for_prompt([3, 4])), 0, 2, samples=1)
        assert (Sampler().draws([part]) is None) == bool(asked)
    chunk = PlanPart(Request("r", [3, 4, 5], recipe.for_prompt([3, 4, 5])), 0, 2, samples=0, prompt_rows=2)
    assert Sampler().draws([chunk]) is None


def test_prompt_rows_are_told_apart_from_sampled_ones(model) -> None:
    def request(prompt: list[int], **asked: Any) -> Request:
        recipe = make_recipe(model, None, PLAIN | asked, tokenizer=None, default_length=20)
        return Request("r", prompt, recipe.for_prompt(prompt))

    scored = request([3, 4, 5, 6, 7], prompt_logprobs=1)
    parts = [
        PlanPart(request([8, 9]), 1, 1, samples=1),
        PlanPart(scored, 1, 2, samples=0, prompt_rows=2),
        PlanPart(request([5, 6, 7], prompt_logprobs=0), 0, 3, samples=1, prompt_rows=2),
    ]
    logits = torch.randn(6, 128)
    sampled, prompts = split(logits, parts)
    assert torch.equal(sampled, logits[[0, 5]])
    told = prompts.read()
    want = logits.log_softmax(-1)
    first, last = told[scored], told[parts[2].request]
    assert [found[i] for found, i in zip(first, (5, 6), strict=True)] == pytest.approx(
        [float(want[1, 5]), float(want[2, 6])]
    )
    assert [max(found, key=found.get) for found in first] == want[1:3].argmax(-1).tolist()
    assert [set(found) for found in last] == [{6}, {7}]
    assert last[1][7] == pytest.approx(float(want[4, 7]))
