"""Each policy on a few requests: golden steps of the real scheduler, on a simulated clock where a step takes 1 s."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from hf_cb.config import EngineConfig
from hf_cb.engine.simulation import WORKED_BUDGETS, WORKED_EXAMPLE, SimulatedRequest, Simulation
from hf_cb.policies import Fair, make_policy


def sim(name: str, prompt: int, output: int, **more: Any) -> SimulatedRequest:
    return SimulatedRequest(name, prompt, output, **more)


def simulate(given: list[SimulatedRequest], **options: Any) -> tuple[list[str], dict[str, Any]]:
    """Each step's contents, with ... where nobody was let in, and the requests by name."""
    simulation = Simulation(given, EngineConfig(**options))
    some = itertools.islice(simulation, 1000)  # rather than for ever
    steps = ["+".join(f"{name}{tokens}" for name, tokens in step.parts) or "..." for step in some]
    simulation.engine.check_idle()
    assert all(r.finish_reason is not None for r in simulation.requests), "a request is lost"
    return steps, {r.request_id: r for r in simulation.requests}


def test_the_worked_example() -> None:
    simulation = Simulation(WORKED_EXAMPLE, EngineConfig(**WORKED_BUDGETS))
    steps = list(simulation)
    assert [step.parts for step in steps] == [
        [("A", 1), ("B", 1)],
        [("A", 1), ("B", 1)],
        [("B", 1), ("C", 4)],
        [("B", 1), ("C", 3)],
    ]
    assert [step.record and step.record.bound_by for step in steps] == ["requests", "requests", "tokens", None]
    assert [step.first_tokens for step in steps] == [[], [], [], ["C"]]
    assert [[r.request_id for r in step.ended] for step in steps] == [[], ["A"], [], ["B", "C"]]
    simulation.engine.check_idle()


@pytest.mark.parametrize("name", ["continuous", "fifo", "inflight", "iteration"])
def test_continuous_lets_a_request_join_when_another_ends(name: str) -> None:
    given = [sim("A", 2, 1), sim("B", 2, 4), sim("C", 2, 2)]
    steps, _ = simulate(given, policy=name, max_num_seqs=2)
    assert steps == ["A2+B2", "B1+C2", "B1+C1", "B1"]


def test_static_holds_its_batch_until_the_slowest_ends() -> None:
    given = [sim("A", 2, 1), sim("B", 2, 4), sim("C", 2, 2), sim("D", 2, 1)]
    steps, _ = simulate(given, policy="static:2", max_num_seqs=3)
    assert steps == ["A2+B2", "B1", "B1", "B1", "C2+D2", "C1"]


def test_static_waits_for_enough_requests() -> None:
    given = [sim("A", 2, 1), sim("B", 2, 1, arrival=3), sim("C", 2, 1, arrival=50)]
    steps, r = simulate(given, policy="static:2:10")
    assert steps == ["...", "A2+B2", "C2"]
    assert r["A"].started == 3 and r["C"].started == 50, "no more can come, so C does not wait"


def test_static_waits_no_longer_than_nobody_comes() -> None:
    steps, r = simulate([sim("A", 2, 1), sim("B", 2, 1, arrival=50)], policy="static:batch_size=2:quiet=4")
    assert steps == ["...", "A2", "B2"] and r["A"].started == 4


def test_dynamic_waits_for_enough_requests_or_the_window() -> None:
    given = [sim("A", 2, 1), sim("B", 2, 1, arrival=2), sim("C", 2, 1, arrival=9), sim("D", 2, 2, arrival=20)]
    given += [sim("E", 2, 1, arrival=21), sim("F", 2, 1, arrival=22)]
    steps, r = simulate(given, policy="dynamic:3:4")
    assert steps == ["...", "...", "A2+B2", "...", "C2", "...", "...", "D2+E2+F2", "D1"]
    assert [r[name].started for name in "ABCDEF"] == [4, 4, 13, 22, 22, 22]


def test_a_batch_that_blocks_hold_up_runs_in_turns() -> None:
    given = [sim(name, 4, 5) for name in "ABCD"]
    steps, r = simulate(given, policy="static:4", block_size=4, num_blocks=4)
    assert steps[0] == "A4+B4+C4+D4"
    assert all(len(request.output_ids) == 5 for request in r.values())


def test_prefill_first() -> None:
    given = [sim("A", 1, 9, running=True), sim("B", 7, 1)]
    assert simulate(given, policy="prefill_first", max_batch_tokens=4)[0][:3] == ["B4", "B3+A1", "A1"]
    assert simulate(given, policy="fifo", max_batch_tokens=4)[0][:3] == ["A1+B3", "A1+B2", "A1+B2"]


def test_prompts_that_lack_blocks_do_not_take_turns_for_ever() -> None:
    """A gives way, and C may not start in the same step: it would take what D can end with."""
    given = [sim("D", 1, 6), sim("A", 5, 1, arrival=1), sim("C", 5, 1, arrival=1)]
    steps, _ = simulate(given, policy="prefill_first", num_blocks=3, block_size=2, max_batch_tokens=2)
    assert steps == ["D1", "A2", "A1+D1", "D1", "D1", "D1", "D1", "A2", "A1+C1", "A2", "C2", "C1", "C2"]


def test_priority_serves_the_smallest_number_first() -> None:
    given = [sim("A", 1, 2), sim("B", 2, 1, priority=5), sim("C", 2, 1), sim("D", 2, 1, priority=-1)]
    steps, _ = simulate(given, policy="priority", max_num_seqs=1)
    assert steps == ["D2", "A1", "A1", "C2", "B2"]


def test_priority_takes_the_place_of_a_running_request() -> None:
    given = [sim("A", 4, 6, priority=1), sim("B", 4, 2, arrival=2), sim("C", 4, 1, priority=1, arrival=3)]
    steps, r = simulate(given, policy="priority", max_num_seqs=1, block_size=2)
    assert steps == ["A4", "A1", "B4", "B1", "A2", "A1", "A1", "A1", "C4"]
    assert r["A"].metrics.preemptions == 1 and len(r["A"].output_ids) == 6, "its prompt was still in the cache"


def test_priority_takes_blocks_of_a_running_request() -> None:
    given = [sim("A", 4, 4, priority=1), sim("B", 4, 4, priority=2), sim("C", 4, 2, arrival=1)]
    steps, r = simulate(given, policy="priority", block_size=4, num_blocks=4)
    assert steps[1] == "A1+C4" and r["B"].metrics.preemptions == 1 and r["A"].metrics.preemptions == 0


def test_priority_ages() -> None:
    important = [sim(f"N{i}", 1, 1, arrival=i) for i in range(20)]
    for ageing, started in ((4, 4), (1000, 20)):
        given = [sim("old", 1, 1, priority=1), *important]
        _, r = simulate(given, policy=f"priority:{ageing}", max_num_seqs=1)
        assert r["old"].started == started


def test_fair_takes_turns_between_users() -> None:
    given = [sim(f"A{i}", 4, 1, user="a") for i in range(4)] + [sim(f"B{i}", 4, 1, user="b") for i in range(2)]
    steps, _ = simulate(given, policy="fair", max_num_seqs=1)
    assert [step[:2] for step in steps] == ["A0", "B0", "A1", "B1", "A2", "A3"]


def test_fair_counts_tokens_and_not_requests() -> None:
    given = [sim(f"A{i}", 8, 1, user="a") for i in range(3)] + [sim(f"B{i}", 2, 1, user="b") for i in range(5)]
    steps, _ = simulate(given, policy="fair", max_num_seqs=1)
    assert [step[:2] for step in steps] == ["A0", "B0", "B1", "B2", "A1", "B3", "B4", "A2"]


def test_fair_has_weights() -> None:
    given = [sim(f"A{i}", 4, 1, user="a") for i in range(6)] + [sim(f"B{i}", 4, 1, user="b") for i in range(3)]
    steps, _ = simulate(given, policy="fair:a=2", max_num_seqs=1)
    assert "".join(step[0] for step in steps[:6]).count("A") == 4


def test_fair_lets_nobody_save_up() -> None:
    """B was away while A was served for long: B does not get all of the machine for as long."""
    given = [sim(f"A{i}", 8, 1, user="a") for i in range(12)]
    given += [sim(f"B{i}", 8, 1, user="b", arrival=6) for i in range(6)]
    steps, _ = simulate(given, policy="fair", max_num_seqs=1)
    assert [step[0] for step in steps[6:12]] in (list("BABABA"), list("ABABAB"))


def test_fair_forgets_users_who_were_not_served_more_than_others() -> None:
    policy = Fair()
    given = [sim(f"r{i}", 1, 1, user=f"u{i}", arrival=float(i)) for i in range(3000)]
    assert len(list(Simulation(given, EngineConfig(policy=policy)))) == 3000
    assert len(policy.served) < 1100


def test_deadline_serves_the_earliest_first() -> None:
    given = [sim("A", 2, 1, deadline=50), sim("B", 2, 1), sim("C", 2, 1, deadline=9), sim("D", 2, 1, deadline=20)]
    assert simulate(given, policy="deadline:30", max_num_seqs=1)[0] == ["C2", "D2", "B2", "A2"]


def test_deadline_puts_off_and_reports_who_cannot_make_it() -> None:
    given = [sim("warm", 1, 1), sim("A", 2, 9, arrival=1, deadline=4), sim("B", 2, 2, arrival=1, deadline=8)]
    steps, r = simulate(given, policy="deadline", max_num_seqs=1)
    assert steps[:3] == ["warm1", "B2", "B1"]
    assert r["A"].metrics.will_miss and r["A"].finish_reason == "timeout" and r["A"].finished < 7
    assert not r["B"].metrics.will_miss and r["B"].finish_reason == "length"


def test_longest_prefix_comes_first() -> None:
    shared = dict(prefix="system", prefix_tokens=8)
    given = [sim("A", 9, 1, **shared), sim("B", 9, 1, arrival=0.5), sim("C", 9, 1, arrival=0.5, **shared)]
    assert simulate(given, policy="longest_prefix", max_num_seqs=1, block_size=4)[0] == ["A9", "C1", "B9"]
    assert simulate(given, policy="fifo", max_num_seqs=1, block_size=4)[0] == ["A9", "B9", "C1"]


def test_longest_prefix_lets_nobody_wait_for_longer_than_its_bound() -> None:
    shared = dict(prefix="system", prefix_tokens=8)
    given = [sim("A", 9, 1, **shared), sim("B", 9, 1, arrival=0.5)]
    given += [sim(f"C{i}", 9, 1, arrival=0.5 + i, **shared) for i in range(20)]
    _, r = simulate(given, policy="longest_prefix:4", max_num_seqs=1, block_size=4)
    assert r["B"].started == 5


def test_the_policy_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    block = text.split("```python")[-1].split("```")[0]
    names: dict[str, Any] = {}
    exec(block.split("\n\n\nconfig =")[0], names)
    given = [sim("long", 90, 1), sim("short", 2, 1), sim("middle", 30, 1)]
    steps, _ = simulate(given, policy=names["ShortestFirst"](), max_num_seqs=1)
    assert steps == ["short2", "middle30", "long90"]


def test_an_object_serves_one_manager_after_the_other() -> None:
    for policy in (make_policy("static:2"), make_policy("fair")):
        given = [sim(name, 2, 2) for name in "ABC"]
        first = [s.parts for s in Simulation(given, EngineConfig(policy=policy))]
        assert [s.parts for s in Simulation(given, EngineConfig(policy=policy))] == first
