"""Turns that were never played: latencies from a distribution, with what differs between rounds."""

from __future__ import annotations

import numpy as np

from hf_cb.bench.replay.turn import Served, Turn


def make_turns(
    setting: str,
    seed: int,
    slower: float = 1.0,
    rounds: int = 4,
    n: int = 40,
    drift: float = 0.05,
    noise: float = 0.1,
    tokens: int = 6,
) -> list[Turn]:
    """`slower` multiplies every latency. Requests are the same for every seed; rounds and noise are not.

    The spread of a round is `drift`, that of a request in a round `noise`, both of the logarithm.
    """
    base = np.random.default_rng(99).lognormal(-1.0, 1.0, n)
    random = np.random.default_rng([seed, len(setting)])
    turns = []
    for number in range(rounds):
        pace = slower * random.lognormal(0.0, drift)
        requests = []
        for i in range(n):
            ttft = float(base[i] * pace * random.lognormal(0.0, noise))
            gaps = (0.02 * pace * random.lognormal(0.0, noise, tokens - 1)).tolist()
            wait = ttft / 2
            requests.append(
                Served(i * 0.1, "done", 0.0, wait, ttft - wait, ttft, ttft + sum(gaps), gaps=gaps, tokens=tokens)
            )
        turns.append(Turn(setting, number, 10 * pace, requests))
    return turns
