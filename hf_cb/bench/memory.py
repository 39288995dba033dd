"""The most memory that processes had resident, where the system tells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return [pid]


def reset_peak(pids: Iterable[int]) -> None:
    """From here on, `peak_rss` counts anew; without effect where the system cannot do that."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_rss(pids: Iterable[int]) -> int | None:
    """Bytes, each process's own peak added up; None if no process tells."""
    peaks = [peak for pid in pids if (peak := _high_water(pid)) is not None]
    return sum(peaks) if peaks else None


def _high_water(pid: int) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux, or gone
        pass
    return None
