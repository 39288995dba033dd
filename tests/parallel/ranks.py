"""Runs a function on several ranks, each a process of its own with gloo between them, and returns what became of it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from torch import distributed

PRELOAD = ["torch", "torch.distributed.tensor", "transformers", "ranks", "rank_scenarios", "rank_disorder"]
HANGS_S = 40.0
NEEDS_RANKS = [
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.slow,
]


@dataclass
class Outcome:
    """What a rank returned, or the error that it ended with (none if it died), and after how many seconds."""

    value: Any = None
    error: str | None = None
    died: bool = False
    seconds: float = 0.0


def run_ranks(function: Callable[..., Any], *args: Any, size: int = 2, timeout: float = 60.0) -> list[Outcome]:
    """The outcomes of `function(rank, *args)`, by rank; a rank that has not ended after `timeout` fails the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port, pipes, processes = _free_port(), {}, []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(function, args, rank, size, port, sender), daemon=True)
        process.start()
        sender.close()
        pipes[receiver] = rank
        processes.append(process)
    outcomes, end = [Outcome(died=True) for _ in range(size)], time.monotonic() + timeout
    try:
        while pipes and time.monotonic() < end:
            for pipe in wait(list(pipes), timeout=0.5):
                rank = pipes.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:  # without a word
                    continue
        assert not pipes, f"rank {sorted(pipes.values())} of {function.__name__} hangs; so far: {outcomes}"
        for process in processes:
            process.join(max(1.0, end - time.monotonic()))
        assert not any(p.is_alive() for p in processes), f"a rank of {function.__name__} does not come to its end"
    finally:
        for process in processes:
            process.kill()
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned, none of which has died or raised."""
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    assert not any(outcome.died for outcome in outcomes)
    return [outcome.value for outcome in outcomes]


def _rank(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, port: int, sender: Connection
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stdout = sys.stderr
    began = time.monotonic()
    faulthandler.dump_traceback_later(HANGS_S, exit=False)  # says where, before the test gives up
    try:
        outcome = Outcome(function(rank, *args))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - began
    sender.send(outcome)
    sender.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
