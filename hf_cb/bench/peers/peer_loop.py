"""What all peers' programs have in common: the protocol, and submitting requests when they arrive.

The job: "model" (path), "dtype", "threads", "max_seqs", "max_len" (tokens of the longest request), "token_budget",
"kv_tokens" and "kv_bytes" (what the cache must hold), "prefix_caching". The answer: {"ready": true, "about": {...}}.
A workload: {"requests": [{"prompt": [ids], "max_new": n, "arrival": seconds}]}. The answer: "seconds", "tokens" (a
list of ids a request) and "times" (a list of seconds a request, one a token). Instead of either:
{"cannot": why} or {"error": traceback}.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


class CannotRun(Exception):
    """The peer is not able to do this at all, which is no failure."""


class Peer:
    """A peer, to be driven step by step; `about` says which version and options it runs with."""

    about: dict[str, Any] = {}

    def reset(self) -> None:
        """Forgets prefixes that it has cached; not on the clock."""

    def add(self, index: int, prompt: list[int], max_new: int) -> None:
        """Takes a request: greedy, deaf to end tokens."""
        raise NotImplementedError

    def busy(self) -> bool:
        """Whether a request is unfinished."""
        raise NotImplementedError

    def step(self) -> list[tuple[int, list[int]]]:
        """Goes on until there are tokens, and gives them: pairs of a request's index and its new ids."""
        raise NotImplementedError


def drive(peer: Peer, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs a workload: each request goes in at its arrival, or after the step that is then running."""
    todo = sorted(range(len(requests)), key=lambda i: requests[i]["arrival"])[::-1]
    tokens: list[list[int]] = [[] for _ in requests]
    times: list[list[float]] = [[] for _ in requests]
    peer.reset()
    started = time.perf_counter()
    while todo or peer.busy():
        now = time.perf_counter() - started
        while todo and requests[todo[-1]]["arrival"] <= now:
            index = todo.pop()
            peer.add(index, requests[index]["prompt"], requests[index]["max_new"])
        if not peer.busy():
            time.sleep(max(0.0, requests[todo[-1]]["arrival"] - (time.perf_counter() - started)))
            continue
        made = peer.step()
        now = time.perf_counter() - started
        for index, ids in made:
            tokens[index] += ids
            times[index] += [now] * len(ids)
    return {"seconds": time.perf_counter() - started, "tokens": tokens, "times": times}


def serve(make_peer: Callable[[dict[str, Any]], Peer]) -> None:
    """Answers until standard input ends. What libraries print goes to standard error."""
    _die_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(work: Callable[[], dict[str, Any]]) -> None:
        try:
            found = work()
        except CannotRun as error:
            found = {"cannot": str(error)}
        except Exception:
            found = {"error": traceback.format_exc()}
        print(json.dumps(found), file=out, flush=True)

    peers: list[Peer] = []

    def start() -> dict[str, Any]:
        peers.append(make_peer(job))
        return {"ready": True, "about": peers[0].about}

    job = json.loads(sys.stdin.readline())
    answer(start)
    for line in sys.stdin:
        if not peers:
            break
        workload = json.loads(line)
        answer(lambda: drive(peers[0], workload["requests"]))  # noqa: B023  (answered before the next line)
    out.close()


def _die_with_parent() -> None:
    """A stopped process does not see that its input has ended."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
