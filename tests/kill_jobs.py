"""Runs a `hf-cb` command five times and kills it each time when its output has grown by a random amount.

usage: python kill_jobs.py OUTPUT MOST_BYTES ARGUMENTS...; prints how many were killed before their end

Everything is imported once, and each run is a fork of that.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import transformers.models.llama.modeling_llama  # noqa: F401

import hf_cb.cli.job_answers
import hf_cb.patching  # noqa: F401
from hf_cb.cli import main

TIMES = 5


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def run_and_kill(arguments: list[str], target: Path, enough: int) -> bool:
    """Whether it was killed before its end."""
    child = os.fork()
    if child == 0:
        os._exit(main(arguments))
    while size(target) <= enough:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    target, most = Path(sys.argv[1]), int(sys.argv[2])
    print(sum(run_and_kill(sys.argv[3:], target, size(target) + random.randrange(most)) for _ in range(TIMES)))
