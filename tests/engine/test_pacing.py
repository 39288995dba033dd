"""How much prompt a step takes while answers are running, on simulated clocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_runner import make_engine, request, run

from hf_cb.config import EngineConfig
from hf_cb.engine.pacing import LEAST_TOKENS
from hf_cb.engine.simulation import SimulatedRequest, SimulatedStep, Simulation


def simulate(
    step_time: Callable[[int, int], float], target: float | None, **options: int
) -> tuple[list[SimulatedStep], Simulation]:
    """Four answers are running, and prompts keep coming."""
    given = [SimulatedRequest(f"answer{i}", 8, 1500, running=True) for i in range(4)]
    given += [SimulatedRequest(f"prompt{i}", 600, 1, arrival=0.02 * i) for i in range(200)]
    config = EngineConfig(itl_target=target, max_num_seqs=64, max_batch_tokens=1024, **options)
    simulation = Simulation(given, config, step_time)
    return list(simulation), simulation


def seconds_of_mixed(steps: list[SimulatedStep]) -> list[float]:
    return [s.until - s.at for s in steps if s.record and s.record.decode_tokens and s.record.prefill_tokens]


def plain(rows: int, tokens: int) -> float:
    return 0.010 + 0.0002 * rows + 0.0001 * tokens


def test_without_a_target_a_prompt_takes_the_whole_step() -> None:
    steps, _ = simulate(plain, None)
    assert max(seconds_of_mixed(steps)) > 0.1


@pytest.mark.parametrize("target", [0.020, 0.040, 0.080])
def test_steps_stay_under_the_target_and_use_it(target: float) -> None:
    steps, _ = simulate(plain, target)
    took = seconds_of_mixed(steps)
    assert max(took[:10]) <= target * 1.2, "while little is known"
    assert max(took[10:]) <= target * 1.001
    busy = [s for s in took if s > plain(4, LEAST_TOKENS)]
    assert sorted(busy)[len(busy) // 2] > 0.8 * target, "the target is not used"


def test_noise_and_other_programs_do_not_upset_it() -> None:
    rng = random.Random(0)

    def noisy(rows: int, tokens: int) -> float:
        return plain(rows, tokens) * rng.uniform(0.93, 1.07) * (20.0 if rng.random() < 0.03 else 1.0)

    steps, _ = simulate(noisy, 0.040)
    took = seconds_of_mixed(steps)[10:]
    in_time = sum(s <= 0.040 for s in took) / len(took)
    assert in_time > 0.94, "only the steps that another program held up may be late"
    assert sorted(took)[len(took) // 2] > 0.025


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    clock = {"steps": 0}

    def slower(rows: int, tokens: int) -> float:
        clock["steps"] += 1
        return plain(rows, tokens) * (3.0 if clock["steps"] > 150 else 1.0)

    steps, _ = simulate(slower, 0.080)
    late = [s > 0.081 for s in seconds_of_mixed(steps)]
    assert sum(late) < 40 and not any(late[-100:])


def test_a_target_that_cannot_be_met_starves_no_prompt() -> None:
    steps, simulation = simulate(plain, 0.001)
    assert all(r.finish_reason == "length" for r in simulation.requests)
    assert min(s.record.prefill_tokens for s in steps if s.record and s.record.waiting > 10) >= LEAST_TOKENS - 1


def test_prefill_chunk_holds_for_all_prompts_of_a_step_together() -> None:
    steps, _ = simulate(plain, None, prefill_chunk=100)
    mixed = [s.record for s in steps if s.record and s.record.decode_tokens and s.record.prefill_tokens]
    assert max(r.prefill_tokens for r in mixed) == 100
    assert any(r.bound_by == "tokens" for r in mixed)


def test_prompts_that_hold_nobody_up_are_not_bounded_together() -> None:
    engine = make_engine(max_batch_tokens=16, prefill_chunk=3)
    steps = run(engine, [request(name, [1] * 7, 2) for name in "abc"])
    assert steps[0] == [("a", 3), ("b", 3), ("c", 3)]
    assert max(sum(n for _, n in step) for step in steps[2:]) <= 3 + 3
