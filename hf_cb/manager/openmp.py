"""OpenMP's worker threads: gives back those that a thread of ours leaves idle, and does without them.

OpenMP keeps a pool of workers for every host thread that has ever run a parallel operation. With more pool threads than
cores, libgomp stops spinning at its barriers and sleeps instead, in all pools: with two cores, the idle workers of the
thread that loaded the model make each parallel operation of the engine's thread 40 microseconds slower, and a step of
SmolLM2-135M one and a half times as long (docs/log.md). A pool that is given back is made again when it is needed.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PAUSE_SOFT = 1  # omp_pause_soft: settings and thread-private data stay (OpenMP 5.0, omp_pause_resource_all)
_RUNTIMES = ("libgomp",)  # others end the workers of all threads, the engine's too


def release_idle_workers() -> None:
    """Ends the calling thread's own OpenMP workers, if it has any; takes a microsecond if not."""
    for runtime in _loaded_runtimes():
        runtime.omp_pause_resource_all(_PAUSE_SOFT)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Inside, the calling thread's parallel operations run on itself alone, and other threads' as before.

    Thousands of tiny operations gain nothing from workers; beside a busy program they wait for them a time slice each.
    """
    torch.get_num_threads()  # a thread's first call sets its number
    runtimes = _loaded_runtimes()
    before = [runtime.omp_get_max_threads() for runtime in runtimes]
    for runtime in runtimes:
        runtime.omp_set_num_threads(1)
    try:
        yield
    finally:
        for runtime, threads in zip(runtimes, before, strict=True):
            runtime.omp_set_num_threads(threads)


@functools.cache
def _loaded_runtimes() -> list[Any]:
    """The OpenMP runtimes in this process that can do it; none where the process's libraries cannot be listed."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if os.path.basename(line.split()[-1]).startswith(_RUNTIMES)}
    except OSError:
        return []
    libraries = [ctypes.CDLL(path, mode=os.RTLD_NOLOAD) for path in sorted(paths)]
    return [library for library in libraries if hasattr(library, "omp_pause_resource_all")]
