"""Each cause of waiting, in traffic made for it, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from clocked import Clocked

from hf_cb.core import Request
from hf_cb.errors import PromptError
from hf_cb.metrics.why import why
from hf_cb.policies import Continuous, Static
from hf_cb.policies.base import Situation
from hf_cb.words import duration

Make = Callable[..., Clocked]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda **options: Clocked(monkeypatch, **options)


def said(clocked: Clocked, request: Request, **options: Any) -> str:
    return why(request, list(clocked.engine.records), clocked.now, **options)


def test_alone_nothing_is_waited_for(make: Make) -> None:
    c = make()
    r = c.submit("r", 5, 4)
    c.finish()
    assert said(c, r) == (
        "r reached its length after 48 ms: queued 0.0 ms; prefill of 5 tokens in 1 step (15 ms); "
        "4 tokens at 11 ms each."
    )


def test_queued_as_the_steps_were_full(make: Make) -> None:
    c = make(max_batch_tokens=8, prefill_chunk=8)
    c.submit("long", 24, 1)
    r = c.submit("r", [900, 901], 1)
    c.finish()
    assert "queued 54 ms because the steps were full (8 of 8 query tokens); prefill of 2 tokens in 1 step" in said(c, r)


def test_queued_as_kv_blocks_were_full(make: Make) -> None:
    c = make(num_blocks=4, block_size=4, prefix_caching=False)
    c.submit("large", 13, 3)
    r = c.submit("r", 5, 1)
    c.finish()
    assert "queued 45 ms because KV blocks were full (4 of 4);" in said(c, r)


def test_queued_as_all_places_were_taken(make: Make) -> None:
    c = make(max_num_seqs=1)
    c.submit("first", 5, 3)
    r = c.submit("r", 5, 1)
    assert said(c, r) == "r waits, 0.0 ms after it came: queued so far 0.0 ms."
    c.step(2)
    assert said(c, r) == (
        "r waits, 26 ms after it came: queued so far 26 ms because all places were taken (1 of 1 requests)."
    )
    c.finish()
    assert "queued 37 ms because all places were taken (1 of 1 requests); prefill" in said(c, r)


def test_queued_for_two_reasons_one_after_the_other(make: Make) -> None:
    c = make(max_num_seqs=2, max_batch_tokens=8)
    c.submit("a", 20, 1)
    c.submit("b", [900] * 5, 3)
    r = c.submit("r", [800], 1)
    c.finish()
    assert (
        "queued 53 ms (36 ms because the steps were full (8 of 8 query tokens), "
        "17 ms because all places were taken (2 of 2 requests));" in said(c, r)
    )


class Holding(Continuous):
    """Starts nobody in the second and third step."""

    name = "holding"
    steps = 0

    def order(self, situation: Situation) -> Iterable[Request]:
        self.steps += 1
        return [*situation.running, *(situation.waiting if self.steps not in (2, 3) else [])]


def test_held_back_by_the_policy(make: Make) -> None:
    c = make(policy=Holding())
    c.submit("first", 5, 5)
    c.step()
    r = c.submit("r", 5, 1)
    c.finish()
    assert "queued 22 ms because the policy (holding) held it back, with room in every budget;" in said(
        c, r, policy=Holding()
    )


def test_no_step_ran_as_the_policy_held_everybody_back(make: Make) -> None:
    policy = Static(2, quiet=3.0)
    c = make(policy=policy)
    r = c.submit("r", 5, 1)
    c.step()
    c.now += 3.5
    c.finish()
    assert "queued 3.50 s because no step ran (the policy (static) held all back, or " in said(c, r, policy=policy)


def test_came_while_a_step_ran(make: Make) -> None:
    c = make()
    c.submit("first", 5, 3)
    c.step()
    r = c.submit("r", [7], 1)
    r.created -= 0.012  # in the middle of it
    c.finish()
    assert "queued 12 ms because a step was running when it came;" in said(c, r)


def test_no_step_ran(make: Make) -> None:
    c = make()
    r = c.submit("r", 5, 3)
    c.now += 2
    c.step()
    c.now += 5  # a pause
    c.finish()
    assert "queued 2.00 s because no step ran" in said(c, r)
    assert "3 tokens at 11 ms each, stalled 5.00 s once as no step ran" in said(c, r)


def test_a_prompt_in_pieces_by_the_chunk_and_by_the_budget(make: Make) -> None:
    c = make(prefill_chunk=5, max_batch_tokens=64)
    r = c.submit("r", 12, 1)
    c.step()
    assert "r is in its prompt, 15 ms after it came" in said(c, r)
    assert "prefill of 5 of 12 tokens in 1 step" in said(c, r)
    c.finish()
    assert "prefill of 12 tokens in 3 steps (42 ms, at most 5 a step)" in said(c, r)
    c = make(max_batch_tokens=8)
    c.submit("other", [900], 9)
    c.step()
    r = c.submit("r", 12, 1)
    c.finish()
    assert "prefill of 12 tokens in 2 steps (34 ms, as the steps were full: 8 of 8 query tokens, beside other)" in said(
        c, r
    )


def test_a_cached_prefix(make: Make) -> None:
    c = make()
    c.submit("first", 10, 1)
    c.finish()
    r = c.submit("r", 10, 1)
    c.finish()
    assert "prefill of 2 tokens in 1 step (12 ms), 8 more found in the prefix cache;" in said(c, r)


def test_stalled_by_the_prompts_of_others(make: Make) -> None:
    c = make(num_blocks=200)
    r = c.submit("r", 5, 12)
    c.step(4)
    c.submit("req_7", [900] * 120, 1)
    c.step(3)
    c.submit("req_8", [901] * 40, 1)
    c.submit("req_9", [902] * 60, 1)
    c.finish()
    # the tokens of one prompt and of two, a millisecond each
    assert "12 tokens at 11 ms each, stalled 220 ms twice by the prompts of req_7, req_9 and req_8." in said(c, r)


def test_a_slow_forward(make: Make) -> None:
    c = make()
    r = c.submit("r", 5, 12)
    c.step(4)
    c.extra = 0.3
    c.finish()
    assert "12 tokens at 11 ms each, stalled 300 ms once by slow forwards." in said(c, r)


def test_left_out_of_steps(make: Make) -> None:
    class Others(Continuous):
        def order(self, situation: Situation) -> Iterable[Request]:
            return sorted([*situation.running, *situation.waiting], key=lambda r: r.request_id == "r")

    c = make(policy=Others(), max_batch_tokens=1)
    r = c.submit("r", [1], 8)
    c.step(3)
    c.submit("a", [9], 4)
    c.finish()
    assert "8 tokens at 11 ms each, stalled 44 ms once by the prompt of a." in said(c, r)
    c.submit("b", [9], 4)
    c.step()
    r = c.submit("r", [1], 4)
    c.finish()
    assert "queued 33 ms because the steps were full (1 of 1 query tokens)" in said(c, r)


def test_preempted(make: Make) -> None:
    c = make(num_blocks=4, block_size=4, prefix_caching=False)
    c.submit("old", 6, 8)
    r = c.submit("r", 6, 8)
    while not r.metrics.preemptions:
        c.step()
    assert said(c, r).startswith("r waits, ")
    c.finish()
    assert r.metrics.preemptions == 1
    found = said(c, r)
    assert "preempted once (waited 55 ms because KV blocks were full (" in found
    assert "recomputed 8 tokens)" in found
    assert "8 tokens at 11 ms each" in found and "stalled" not in found


def test_a_step_that_raised(make: Make) -> None:
    c = make()
    bad = c.submit("bad", [666], 2)
    good = c.submit("good", [5], 2)
    plain = c.engine.runner.forward

    def forward(batch: Any) -> Any:
        if 666 in batch.input_ids:
            c.now += 0.05
            raise ValueError("no such number")
        return plain(batch)

    c.engine.runner.forward = forward
    c.finish()
    assert said(c, bad).startswith("bad failed after 100 ms (ValueError: no such number): queued 0.0 ms;")
    assert "preempted once (waited 100 ms because a step had raised and ran again in parts," in said(c, good)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_ended_in_the_queue(make: Make, reason: Any) -> None:
    c = make(max_num_seqs=1)
    c.submit("first", 5, 9)
    r = c.submit("r", 5, 1)
    c.step(3)
    c.engine.cancel(r, reason)
    at = c.now
    c.finish()
    verb = {"cancelled": "was cancelled", "timeout": "ran out of time"}[reason]
    assert at < c.now
    assert said(c, r) == f"r {verb} after 37 ms: queued 37 ms because all places were taken (1 of 1 requests)."


def test_refused_before_it_was_queued(make: Make) -> None:
    c = make()
    r = Request("r", [1], c.submit("first", 5, 1).params, created=c.now)
    assert said(c, r, error=PromptError("too long")).startswith("r failed after 0.0 ms (PromptError: too long): queued")


def test_what_the_ring_has_forgotten_is_said_so(make: Make) -> None:
    c = make(trace_steps=5)
    r = c.submit("r", 5, 40)
    c.step(20)
    assert said(c, r) == (
        "r decodes, 224 ms after it came: queued 0.0 ms; prefill of 5 tokens (15 ms); 20 tokens at 11 ms each; "
        "what came before step 15 is no longer on record (trace_steps keeps 5)."
    )
    c.finish()
    other = c.submit("other", 5, 40)
    c.finish()
    assert "40 tokens at 11 ms each" in said(c, other)
    assert said(c, r).startswith("r reached its length after 444 ms: queued 0.0 ms; prefill of 5 tokens (15 ms); 40 t")


def test_drafts_come_several_at_a_time(make: Make) -> None:
    class Counting:
        def propose(self, request: Request, most: int) -> list[int]:
            return [request.token_ids[-1] + 1, 0]  # the first is right, the second is not

    c = make(drafts=Counting())
    r = c.submit("r", 5, 9)
    c.finish()
    assert "9 tokens at 6.5 ms each." in said(c, r)
    assert "recomputed" not in said(c, r)


def test_durations_have_two_or_three_digits() -> None:
    found = [duration(s) for s in (math.nan, 0.0, 0.0042, 0.042, 0.99949, 0.9996, 42.0, 420.0)]
    assert found == ["–", "0.0 ms", "4.2 ms", "42 ms", "999 ms", "1.00 s", "42.00 s", "420 s"]
