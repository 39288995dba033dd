"""While steps run, threads switch often; Python's own setting comes back. (What it is worth: `hf_cb.bench.readers`.)"""

from __future__ import annotations

import sys
import time

import pytest
from tiny_models import greedy, make_model, make_prompts

from hf_cb import EngineConfig
from hf_cb.manager.switching import switch_interval

PROMPTS = make_prompts([5, 9])


def wait_for(interval: float) -> bool:
    end = time.monotonic() + 5
    while sys.getswitchinterval() != interval and time.monotonic() < end:
        time.sleep(0.01)
    return sys.getswitchinterval() == interval


def test_only_while_steps_run(patched) -> None:
    before = sys.getswitchinterval()
    with make_model().continuous_batching_context_manager() as manager:
        assert wait_for(before)
        handle = manager.submit(PROMPTS[0], greedy(200))
        next(iter(handle))
        assert sys.getswitchinterval() == pytest.approx(1e-4, rel=0.05)
        handle.result(10)
        assert wait_for(before)


@pytest.mark.usefixtures("patched")
def test_it_can_be_left_alone() -> None:
    before = sys.getswitchinterval()
    config = EngineConfig(switch_interval=None)
    with make_model().continuous_batching_context_manager(continuous_batching_config=config) as manager:
        handle = manager.submit(PROMPTS[0], greedy(200))
        next(iter(handle))
        assert sys.getswitchinterval() == before


def test_the_shortest_wins_and_somebody_elses_stays() -> None:
    before = sys.getswitchinterval()
    with switch_interval(1e-3):
        with switch_interval(1e-4), switch_interval(None):
            assert sys.getswitchinterval() == pytest.approx(1e-4, rel=0.05)
        assert sys.getswitchinterval() == pytest.approx(1e-3, rel=0.05)
        sys.setswitchinterval(2e-3)
    assert sys.getswitchinterval() == pytest.approx(2e-3, rel=0.05)
    sys.setswitchinterval(before)
