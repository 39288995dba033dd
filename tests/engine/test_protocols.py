"""What is fixed from the first day: each protocol takes a second implementation, and the answers stay right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from fake_runner import make_engine, request, run
from tiny_models import generate_alone, greedy, make_model, make_prompts

from hf_cb.attention import backend as backends
from hf_cb.attention.reference import ReferenceBackend
from hf_cb.config import EngineConfig
from hf_cb.core import Request
from hf_cb.engine.sampler import Sampled, Sampler
from hf_cb.policies import Policy, Situation
from hf_cb.steps import LayerFacts, PlanPart


class LongestPromptFirst(Policy):
    """A user's own policy."""

    name = "longest"

    def order(self, situation: Situation) -> Iterable[Request]:
        return [*situation.running, *sorted(situation.waiting, key=lambda r: -len(r.prompt_ids))]

    def victim(self, candidates: Sequence[Request]) -> Request:
        return candidates[-1]


def test_policy() -> None:
    engine = make_engine(max_num_seqs=1, policy=LongestPromptFirst())
    steps = run(engine, [request("short", [1], 1), request("long", [1, 2, 3], 1)])
    assert [step[0][0] for step in steps] == ["long", "short"]


@pytest.mark.usefixtures("patched")
def test_policy_through_the_face(shared_llama) -> None:
    prompts = make_prompts([3, 9])
    config = EngineConfig(policy=LongestPromptFirst(), max_num_seqs=1)
    want = [generate_alone(shared_llama, p, greedy()) for p in prompts]
    assert [r.generated_tokens for r in shared_llama.generate_batch(prompts, greedy(), config).values()] == want


class WorstToken:
    """A sampling step that always takes the least likely token."""

    def draws(self, parts: Sequence[PlanPart]) -> None:
        """It wants the logits."""

    def sample(self, logits: torch.Tensor, parts: Sequence[PlanPart]) -> list[list[Sampled]]:
        rows = iter(logits.argmin(-1).tolist())
        return [[Sampled(next(rows)) for _ in range(part.samples)] for part in parts]


def test_sampling_step() -> None:
    engine, r = make_engine(sampler=WorstToken()), request("r", [5], 3)
    run(engine, [r])
    assert r.output_ids == [0, 0, 0]


class Guesses:
    """Drafts that are right for a while: the fake model counts up, so it is right until `wrong_at`."""

    def __init__(self, wrong_at: int) -> None:
        self.wrong_at = wrong_at

    def propose(self, request: Request, at_most: int) -> list[int]:
        last = request.token_ids[-1]
        return [0 if last + i == self.wrong_at else last + i for i in range(1, 4)][:at_most]


def test_draft_source() -> None:
    engine, r = make_engine(drafts=Guesses(wrong_at=12)), request("r", [5], 12)
    steps = run(engine, [r])
    assert r.output_ids == list(range(6, 18))
    assert [count for step in steps for _, count in step] == [1, 4, 4, 4, 1]  # 12 was guessed wrong
    engine.check_idle()


def test_drafts_on_a_real_model_change_no_token(shared_llama) -> None:
    from hf_cb.attention import interception
    from hf_cb.core import SamplingParams
    from hf_cb.manager.build import build_engine

    class Repeats:
        def propose(self, request: Request, at_most: int) -> list[int]:
            return request.token_ids[-2 : -2 + 3][:at_most]

    prompts = make_prompts([6, 17])
    interception.install(__name__)
    try:
        engine = build_engine(shared_llama, EngineConfig(block_size=4))
        engine.scheduler.drafts = Repeats()
        requests = [Request(f"r{i}", p, SamplingParams(12)) for i, p in enumerate(prompts)]
        run(engine, requests)
    finally:
        interception.uninstall(__name__)
    assert [r.output_ids for r in requests] == [generate_alone(shared_llama, p, greedy()) for p in prompts]
    engine.check_idle()


def test_a_commit_may_come_one_step_late() -> None:
    engine = make_engine(max_batch_tokens=1)
    requests = [request("a", [1], 5), request("b", [11], 5)]
    for r in requests:
        engine.admit(r)
    flights: list[Any] = []
    while engine.has_work or flights:
        flight = engine.launch() if engine.has_work else None
        if flight is not None:
            flights.append(flight)
        if len(flights) > 1 or flight is None:
            engine.commit(flights.pop(0))
    assert [r.output_ids for r in requests] == [[2, 3, 4, 5, 6], [12, 13, 14, 15, 16]]
    engine.check_idle()


def test_cancelling_in_the_middle_of_a_step_waits_for_its_commit() -> None:
    engine, r = make_engine(), request("r", [1], 5)
    engine.admit(r)
    flight = engine.launch()
    assert engine.cancel(r) is None and engine.kv.pool.num_held == 1
    engine.commit(flight)
    assert r.finish_reason == "cancelled" and r.output_ids == []
    engine.check_idle()


def test_changed_weights_drop_the_prefix_cache() -> None:
    engine, prompt = make_engine(), list(range(1, 14))
    run(engine, [request("a", prompt, 1)])
    engine.runner.key = 1
    assert run(engine, [request("b", prompt, 1)]) == [[("b", 13)]]
    assert run(engine, [request("c", prompt, 1)]) == [[("c", 1)]]


class Counting(ReferenceBackend):
    """A second attention backend."""

    name = "counting"
    calls = 0

    def attend(self, *args: Any) -> torch.Tensor:
        Counting.calls += 1
        return super().attend(*args)


class Narrow(ReferenceBackend):
    name = "narrow"

    def unsupported(self, layer: LayerFacts) -> str | None:
        return "it takes no windows" if layer.window else None


@pytest.mark.usefixtures("patched")
def test_attention_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"narrow": Narrow, "counting": Counting, "reference": ReferenceBackend}
    monkeypatch.setattr(backends, "backends", lambda: known)
    model, prompts = make_model("Mistral"), make_prompts([3, 12])
    want = [generate_alone(model, p, greedy()) for p in prompts]
    assert [r.generated_tokens for r in model.generate_batch(prompts, greedy()).values()] == want
    assert Counting.calls > 0, "the narrow one cannot do windows, so the next one was to be chosen"
    with pytest.raises(ValueError, match="narrow.*no windows"):
        model.generate_batch(prompts, greedy(), EngineConfig(attention="narrow"))


def test_the_default_sampler_is_one_of_its_kind() -> None:
    part = PlanPart(request("r", [1]), 0, 1, samples=1)
    assert Sampler().sample(torch.tensor([[0.0, 3.0, 1.0]]), [part]) == [[Sampled(1)]]
