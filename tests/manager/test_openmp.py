"""Idle OpenMP workers are given back, and come back when they are needed; one thread may do without them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, torch
from hf_cb.manager.openmp import _loaded_runtimes, release_idle_workers

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
x = torch.randn(600, 600)
before = threads()
y = x * 2
with_workers = threads()
release_idle_workers()
release_idle_workers()
without = threads()
assert torch.equal(x * 2, y) and torch.get_num_threads() == 3
print(len(_loaded_runtimes()), before, with_workers, without, threads())
"""

ALONE = """
import threading, torch
from hf_cb.manager.openmp import _loaded_runtimes, single_threaded

torch.set_num_threads(3)
seen = []
with single_threaded():
    inside = torch.get_num_threads()
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
try:
    with single_threaded():
        raise KeyError
except KeyError:
    pass
print(len(_loaded_runtimes()), inside, seen[0], torch.get_num_threads())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the process's libraries cannot be listed here")
def test_workers_go_and_come_back() -> None:
    runtimes, before, with_workers, without, again = _run(SCRIPT)
    if runtimes == 0:
        pytest.skip("no OpenMP runtime that can pause is loaded")
    assert with_workers == before + 2 and without == before and again == with_workers


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the process's libraries cannot be listed here")
def test_one_thread_alone_and_others_as_before() -> None:
    runtimes, inside, other, after = _run(ALONE)
    if runtimes == 0:
        pytest.skip("no OpenMP runtime that can pause is loaded")
    assert (inside, other, after) == (1, 3, 3)


def _run(script: str) -> list[int]:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    out = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return [int(word) for word in out.stdout.split()]
