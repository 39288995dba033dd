"""How much of the cores went to somebody else while an engine was measured: then its figures are not to be trusted."""

from __future__ import annotations

import os
import time

import psutil

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # stolen: given to another virtual machine


DISTURBING = 0.1  # cores


def disturbed(cores: float) -> str | None:
    """That other programs kept so many cores busy, in words; None if it does not matter."""
    return f"other programs kept up to {cores:.1f} cores busy meanwhile" if cores > DISTURBING else None


class OtherWork:
    """From its making on, the cores' time that is neither this process's nor that of its children."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._busy, self._ours = _busy(), _ours()

    def cores(self) -> float:
        """Cores that others kept busy, on average."""
        seconds = time.perf_counter() - self._began
        others = (_busy() - self._busy) - (_ours() - self._ours)
        return max(0.0, others / seconds)


def _busy() -> float:
    """Seconds, of the cores that this process may run on."""
    cores = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):
        cores = [cores[i] for i in os.sched_getaffinity(0) if i < len(cores)]
    return sum(getattr(times, name, 0.0) for times in cores for name in BUSY)


def _ours() -> float:
    """Seconds, with those of children that have ended."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + getattr(times, "children_user", 0) + getattr(times, "children_system", 0)
    return total
