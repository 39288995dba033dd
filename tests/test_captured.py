"""Decode steps that are recorded and replayed give the tokens of the model's own steps."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from captured_models import Harness
from recorded import Recorded
from tiny_models import generate_alone, greedy, make_model, make_prompts

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams
from hf_cb.models.plan import Need, plan_paged
from hf_cb.models.recorded.captured import ladder

pytestmark = pytest.mark.usefixtures("intercepted")

PROMPTS = make_prompts([9, 1, 26, 14, 5])


def want(model: Any, prompts: list[list[int]], new: int = 10) -> list[list[int]]:
    return [generate_alone(model, p, greedy(new)) for p in prompts]


def test_the_ladder_begins_with_the_largest_and_ends_with_one() -> None:
    assert ladder(20) == [20, 16, 8, 4, 2, 1] and ladder(1) == [1] and ladder(256)[:3] == [256, 192, 128]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3"])  # the second has a window
def test_tokens(family: str, overlap: bool) -> None:
    harness = Harness(make_model(family), overlap=overlap)
    assert harness.tokens(PROMPTS) == want(harness.model, PROMPTS)
    assert harness.replays > 8 and harness.runner.why_not is None
    recorded = len(harness.captures)
    assert harness.tokens(PROMPTS[:2], 20) == want(harness.model, PROMPTS[:2], 20)
    assert len(harness.captures) == recorded == len(ladder(4))
    made = [recording.out for recording in harness.runner._recordings.values()]
    assert len({out.tokens.data_ptr() for out in made}) == 1, "memory for the largest is enough for all"


@pytest.mark.parametrize("overlap", [False, True])
def test_with_few_blocks_and_cancellations(overlap: bool) -> None:
    model, rng = make_model("Llama"), random.Random(3)
    harness = Harness(model, overlap=overlap, num_blocks=14, max_batch_tokens=9)
    requests = [Request(f"r{i}", p, SamplingParams(12)) for i, p in enumerate(PROMPTS)]
    for r in requests:
        harness.engine.admit(r)
    while harness.engine.has_work:
        harness.engine.step()
        if rng.random() < 0.02:
            harness.engine.cancel(rng.choice(requests))
    for r, tokens in zip(requests, want(model, PROMPTS, 12), strict=True):
        assert r.output_ids == tokens[: r.num_output] and (r.finish_reason == "cancelled" or r.num_output == 12)
    assert harness.replays
    harness.engine.check_idle()


def test_log_probabilities_need_logits_which_are_recorded_apart() -> None:
    harness = Harness(make_model("Llama"))
    harness.tokens(PROMPTS[:1])
    r = Request("r", PROMPTS[0], SamplingParams(6, logprobs=True))
    harness.engine.admit(r)
    while harness.engine.has_work:
        harness.engine.step()
    assert len(r.logprobs) == 6 and len(harness.captures) == 2 * len(ladder(4))
    with torch.no_grad():
        logits = harness.model(torch.tensor([r.token_ids])).logits[0].log_softmax(-1)
    first = len(PROMPTS[0]) - 1
    expected = [float(logits[first + i, t]) for i, t in enumerate(r.output_ids)]
    assert torch.allclose(torch.tensor(r.logprobs), torch.tensor(expected), atol=1e-4)


def test_what_is_told_of_a_replay_outlives_the_next_one() -> None:
    """Recorded results lie in a fixed place, and steps overlap."""
    harness = Harness(make_model("Llama"), overlap=True)
    harness.tokens(PROMPTS[:1])
    params = SamplingParams(8, logprobs=True, top_logprobs=3, output_logits=True, output_scores=True)
    requests = [Request(f"r{i}", p, params) for i, p in enumerate(PROMPTS[:3])]
    for r in requests:
        harness.engine.admit(r)
    replays = harness.replays
    while harness.engine.has_work:
        harness.engine.step()
    assert harness.replays > replays
    for r in requests:
        with torch.no_grad():
            logits = harness.model(torch.tensor([r.token_ids])).logits[0, len(r.prompt_ids) - 1 : -1]
        torch.testing.assert_close(torch.stack(r.logits), logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.stack(r.scores), logits, atol=1e-4, rtol=0)
        best = logits.log_softmax(-1).topk(3)
        assert [list(told) for told in r.top_logprobs] == best.indices.tolist()
        assert [list(told.values()) for told in r.top_logprobs] == [
            pytest.approx(v, abs=1e-4) for v in best.values.tolist()
        ]


def test_warmed_up_nothing_is_left_to_record() -> None:
    harness = Harness(make_model("Llama"))
    harness.model.train()
    harness.runner.warm_up()
    assert not harness.captures, "another's training is no time for it"
    harness.model.eval()
    harness.runner.warm_up()
    assert len(harness.captures) == 2 * len(ladder(4)) and not harness.replays
    assert harness.tokens(PROMPTS) == want(harness.model, PROMPTS)
    assert len(harness.captures) == 2 * len(ladder(4)) and harness.replays


def test_sizes_are_those_that_all_work_can_fill() -> None:
    model = make_model("Llama")
    sizes = [plan_paged(model, EngineConfig(max_num_seqs=64), need).config for need in (None, Need(100, 3))]
    assert [(config.max_num_seqs, config.most_rows) for config in sizes] == [(64, 64), (64, 3)]


def test_a_hook_is_called_at_every_step() -> None:
    harness, seen = Harness(make_model("Llama")), []
    harness.tokens(PROMPTS[:1])
    replays = harness.replays
    handle = harness.model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    harness.tokens(PROMPTS[:1])
    assert len(seen) == 10 and harness.replays == replays
    handle.remove()
    harness.tokens(PROMPTS[:1])
    assert harness.replays > replays


def test_other_weights_are_recorded_anew() -> None:
    harness = Harness(make_model("Llama"))
    harness.tokens(PROMPTS[:1])
    with torch.no_grad():
        for p in harness.model.parameters():
            p.data = p.data.roll(1, 0)
    assert harness.tokens(PROMPTS) == want(harness.model, PROMPTS)


def test_weights_that_move_under_running_requests() -> None:
    """A recording reads where they were, and somebody else may have that memory by now."""
    harness, requests = (
        Harness(make_model("Llama")),
        [Request(f"r{i}", p, SamplingParams(20)) for i, p in enumerate(PROMPTS[:2])],
    )
    for r in requests:
        harness.engine.admit(r)
    for step in range(100):
        if step == 9:
            assert harness.replays and harness.engine.has_work
            for p in harness.model.parameters():
                before, p.data = p.data, p.data.clone()
                before.fill_(float("nan"))
        if harness.engine.has_work:
            harness.engine.step()
    assert [r.output_ids for r in requests] == want(harness.model, PROMPTS[:2], 20)
    assert harness.pools == 2, "PyTorch may still hold the pool of the ones before"


def test_adapters_are_switched_between_replays() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = make_model("Llama")
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model.eval(), name)
    harness, seen = Harness(model.eval()), []
    for adapter in ("one", "two", None):
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(adapter is not None)
                if adapter is not None:
                    module.set_adapter(adapter)
        replays = harness.replays
        seen.append(harness.tokens(PROMPTS[:2]))
        assert seen[-1] == want(model, PROMPTS[:2]) and harness.replays > replays, adapter
    assert seen[0] != seen[1] != seen[2]


def test_a_model_that_waits_for_the_device_is_not_recorded(caplog: Any) -> None:
    model = make_model("Llama")
    norm, forward = model.model.norm, type(model.model.norm).forward

    class Waits(type(norm)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x) if x.sum().item() == x.sum().item() else x

    model.model.norm.__class__ = Waits
    caplog.set_level(logging.WARNING, "hf_cb")
    harness = Harness(model)
    assert harness.tokens(PROMPTS) == want(model, PROMPTS)
    assert "_local_scalar_dense.default waits for the device" in harness.runner.why_not
    assert "are not recorded" in caplog.text
    assert not harness.replays and not harness.captures, "nothing was recorded half"


def test_the_stand_in_decides_once_what_python_decides() -> None:
    x, flips = torch.zeros(2), iter([1.0, 5.0])
    capture = Recorded()
    out = capture.record(lambda: x + next(flips))
    x += 1
    capture.replay()
    assert out.tolist() == [2.0, 2.0]
