"""Tokens that are drawn in a recorded step are those that are drawn behind one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_models import Harness
from far_device import far_device
from recorded import TensorBackend, draw_by_hash
from tiny_models import make_model, make_prompts

from hf_cb.core import Request, SamplingParams
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.engine import Engine
from hf_cb.models.paged import PagedModel
from hf_cb.models.recorded.captured import ladder
from hf_cb.penalties import Penalties
from hf_cb.warpers import Warpers

pytestmark = pytest.mark.usefixtures("intercepted")

PROMPTS = make_prompts([9, 1, 26, 14, 5])
DRAWN = dict(do_sample=True, warpers=Warpers(temperature=0.8))
CHANGED = Penalties(repetition=1.5, bias=((7, 9.0),))  # which is often drawn then


def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the numbers say what it does")


def roll(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.roll(1, -1)


MATES = {
    "drawn": [DRAWN | dict(seed=seed) for seed in (1, 2, 3, -4, 2**70)],
    "some greedy": [DRAWN, {}, DRAWN | dict(logprobs=True), dict(logprobs=True), {}],
    "some penalised": [DRAWN, DRAWN | dict(penalties=CHANGED, process=process), {}, DRAWN, DRAWN],
    "some by their own processors": [DRAWN, DRAWN | dict(warpers=None, process=roll), {}, dict(process=roll), DRAWN],
    "some told more": [DRAWN, dict(top_logprobs=2, logprobs=True), DRAWN, dict(output_logits=True), {}],
}


def requests(kind: str, new: int = 12) -> list[Request]:
    return [Request(f"r{i}", PROMPTS[i], SamplingParams(new, **options)) for i, options in enumerate(MATES[kind])]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", list(MATES))
def test_tokens(kind: str, overlap: bool) -> None:
    model = make_model("Llama")
    harness = Harness(model, overlap=overlap)
    got = requests(kind)
    harness.run(got)
    runner = harness.runner
    plain = PagedModel(model, runner.trace, runner.groups, TensorBackend(), runner.num_blocks, runner.block_size)
    harness.engine = Engine(plain, harness.engine.config, sampler=DeviceSampler(draw_by_hash))
    replays, want = harness.replays, requests(kind)
    harness.run(want)
    assert replays > 8 and harness.replays == replays
    for drawn, behind in zip(got, want, strict=True):
        assert drawn.output_ids == behind.output_ids and drawn.logprobs == pytest.approx(behind.logprobs, abs=1e-4)
        assert len(drawn.logprobs) == drawn.num_output * drawn.params.logprobs


def test_a_token_is_drawn_in_the_recording_and_nowhere_else() -> None:
    draws: list[int] = []

    def counted(logits: Any, settings: Any) -> Any:
        draws.append(len(logits))
        return draw_by_hash(logits, settings)

    harness = Harness(make_model("Llama"), overlap=True)
    harness.engine.sampler = DeviceSampler(counted)
    harness.runner.warm_up()
    harness.run(requests("drawn"))
    assert harness.replays >= 12
    # prompts, that is steps with more than one token of a request, are drawn outside
    assert 1 <= len(draws) <= 12, draws


def test_settings_beyond_what_a_kernel_holds_are_the_largest_that_it_does() -> None:
    """`generate` takes a top_k above the vocabulary's size for all of it, however large."""
    seen: list[Any] = []

    def noted(logits: Any, settings: Any) -> Any:
        seen.append(settings)
        return draw_by_hash(logits, settings)

    harness = Harness(make_model("Llama"))
    harness.engine.sampler = DeviceSampler(noted)
    extremes = [(Warpers(top_k=2**31), -1), (Warpers(top_k=2**32 + 1), 2**63), (Warpers(1e39, 2**70), 2**70 + 5)]
    drawn = [SamplingParams(4, do_sample=True, warpers=warpers, seed=seed) for warpers, seed in extremes]
    harness.run([Request(f"r{i}", PROMPTS[i], params) for i, params in enumerate(drawn)])
    for settings in (seen[0], harness.runner._inputs.settings(3)):  # behind a step, and in a recorded one
        assert settings.top_ks[:3].tolist() == [2**31 - 1] * 3
        assert settings.seeds[:3].tolist() == [-1, -(2**63), 5], "the lowest 64 bits"
        assert settings.temperatures[:3].tolist() == [1.0, 1.0, pytest.approx(3.4028235e38)]


def test_a_greedy_request_with_penalties_is_greedy_beside_those_that_draw() -> None:
    found = []
    for mates in ([], [DRAWN, DRAWN]):
        options = [dict(penalties=CHANGED, warpers=Warpers(), process=process), *mates]
        made = [Request(f"r{i}", PROMPTS[i], SamplingParams(12, **more)) for i, more in enumerate(options)]
        Harness(make_model("Llama"), overlap=True).run(made)
        found.append(made[0].output_ids)
    assert found[0] == found[1]


def test_a_runner_that_cannot_draw_leaves_its_logits() -> None:
    found = []
    for draw in (draw_by_hash, None):
        harness = Harness(make_model("Llama"), overlap=True)
        harness.runner._draw = draw
        harness.run(made := requests("drawn"))
        assert harness.replays > 8
        found.append([r.output_ids for r in made])
    assert found[0] == found[1]


def test_what_is_on_its_way_survives_a_recording() -> None:
    """The first request that is not greedy has its kind of step recorded, while the other's token is unread."""
    harness = Harness(make_model("Llama"), overlap=True)
    want = harness.tokens(PROMPTS[:1], 20)
    first, second = Request("first", PROMPTS[0], SamplingParams(20)), Request("r", [3], SamplingParams(4, **DRAWN))
    harness.engine.admit(first)
    for step in range(60):
        if step == 5:
            harness.engine.admit(second)
        harness.engine.step()
    assert len(harness.captures) == 2 * len(ladder(4)) and [first.output_ids] == want and second.num_output == 4


def test_one_copy_there_and_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with far_device(monkeypatch) as watch:
        engine = Harness(make_model("Gemma3"), far=True, overlap=True, max_num_seqs=8).engine  # layers of two kinds
        engine.recovers = False
        for r in requests("drawn", 20):
            engine.admit(r)
        copies = []
        for _ in range(18):
            before = dict(watch.copies)
            engine.step()
            copies.append({way: watch.copies[way] - before[way] for way in before})
    assert len(engine.kv.groups) > 1 and copies[2:] == [{"to": 1, "from": 1}] * 16, copies
