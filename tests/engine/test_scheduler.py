"""Who runs when: golden plans on a runner without a model."""

from __future__ import annotations

from fake_runner import make_engine, request, run

from hf_cb.core import Request
from hf_cb.policies import make_policy


def test_worked_example() -> None:
    """Budget of 5 tokens, at most 2 requests: A has 2 and B has 4 output tokens left, C waits with a prompt of 7."""
    engine = make_engine(max_batch_tokens=5, max_num_seqs=2)
    a, b, c = request("A", [1], 3), request("B", [2], 5), request("C", [3] * 7, 1)
    engine.admit(a)
    engine.admit(b)
    engine.step()  # both prompts: from here on A has 2 and B has 4 tokens left
    assert run(engine, [c]) == [
        [("A", 1), ("B", 1)],
        [("A", 1), ("B", 1)],
        [("B", 1), ("C", 4)],
        [("B", 1), ("C", 3)],
    ]
    assert [r.bound_by for r in list(engine.records)[1:]] == ["requests", "requests", "tokens", None]
    assert c.output_ids == [4]


def test_decode_first_then_running_prompts_then_new_ones() -> None:
    engine = make_engine(max_batch_tokens=4)
    old, long = request("old", [1], 9), request("long", [2] * 6, 1)
    assert run(engine, [old, long])[:3] == [[("old", 1), ("long", 3)], [("old", 1), ("long", 3)], [("old", 1)]]


def test_prefill_first_lets_answers_wait() -> None:
    engine = make_engine(max_batch_tokens=4, policy=make_policy("prefill_first"))
    old, long = request("old", [1], 9), request("long", [2] * 7, 1)
    assert run(engine, [old, long])[:3] == [[("old", 1), ("long", 3)], [("long", 4)], [("old", 1)]]


def test_prefill_chunk_bounds_a_prompt_share() -> None:
    engine = make_engine(max_batch_tokens=16, prefill_chunk=3)
    assert run(engine, [request("a", [1] * 7, 1)]) == [[("a", 3)], [("a", 2)], [("a", 2)]]


def test_nobody_overtakes_a_waiting_request_that_lacks_blocks() -> None:
    engine = make_engine(num_blocks=4, block_size=4)
    steps = run(engine, [request("running", [1] * 9, 3), request("big", [2] * 8, 1), request("small", [3], 1)])
    assert steps[0] == [("running", 9)] and steps[1] == [("running", 1)]
    assert engine.records[1].bound_by == "blocks"


def test_the_newest_gives_way_and_comes_back_with_what_it_had() -> None:
    engine = make_engine(num_blocks=5, block_size=2, prefix_caching=False)
    a, b = request("a", [1, 2, 3], 6), request("b", [11, 12, 13], 6)
    run(engine, [a, b])
    assert (a.metrics.preemptions, b.metrics.preemptions) == (0, 1)
    assert a.output_ids == [4, 5, 6, 7, 8, 9] and b.output_ids == [14, 15, 16, 17, 18, 19]
    engine.check_idle()


def test_preemption_keeps_blocks_reusable() -> None:
    engine = make_engine(num_blocks=6, block_size=2)
    a, b = request("a", [1, 2, 3], 7), request("b", [11, 12, 13], 7)
    run(engine, [a, b])
    assert (a.metrics.preemptions, b.metrics.preemptions) == (0, 1)
    recomputed = [r.prefill_tokens for r in list(engine.records)[1:] if r.prefill_tokens]
    assert recomputed == [5], "of 7 tokens the first block was still there: a needed only the other two"


def test_records_hold_what_was_used_and_allowed() -> None:
    engine = make_engine(max_batch_tokens=8, max_num_seqs=3, num_blocks=10)
    run(engine, [request("a", [1] * 6, 2), request("b", [2] * 6, 2)])
    first, second = list(engine.records)[:2]
    assert (first.prefill_tokens, first.decode_tokens, first.tokens_allowed, first.bound_by) == (8, 0, 8, "tokens")
    assert (second.prefill_tokens, second.decode_tokens) == (4, 1)
    assert (first.blocks_used, first.blocks_allowed, first.requests, first.requests_allowed) == (3, 10, 2, 3)
    assert first.sampled == 1 and second.sampled == 2


def test_equal_prompts_in_one_go_are_computed_once_where_the_first_has_finished_them() -> None:
    engine = make_engine(block_size=4, max_num_seqs=1)
    prompt = list(range(1, 14))
    same: list[Request] = [request(f"r{i}", prompt, 1) for i in range(3)]
    assert run(engine, same) == [[("r0", 13)], [("r1", 1)], [("r2", 1)]]
