"""What a step pays for its StepRecord and its counts.

usage: python -m hf_cb.bench.record_cost [--rows 1,64] [--steps 2000]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from hf_cb.core import Request, SamplingParams, Update
from hf_cb.engine.records import record_of
from hf_cb.metrics.counts import Metrics
from hf_cb.steps import PlanPart, StepPlan, StepRecord

# seconds of a decode step of SmolLM2-135M in bfloat16 on two cores (docs/log.md), which a cost is held against
USUAL_STEP_S = {1: 5.6e-3, 64: 25e-3}
BATCH = 50  # steps timed together


def costs(rows: int, steps: int) -> tuple[float, float]:
    """Seconds that a decode step with so many rows pays for its record, and for the manager's counts; medians."""
    requests = [Request(f"req_{i}", [1] * 100, SamplingParams(10**6)) for i in range(rows)]
    parts = [PlanPart(r, start=120, num_tokens=1, samples=1, was_decoding=True) for r in requests]
    for request in requests:
        request.token_ids.append(1)
        request.timestamps += [1.0, 1.02]
    updates = [Update(request, [1]) for request in requests]
    plan, ring, metrics = StepPlan(parts), deque[StepRecord](maxlen=4096), Metrics()
    names = ("blocks_used", "blocks_cached", "blocks_allowed", "running", "requests_allowed", "waiting", "sampled")
    state: dict[str, Any] = dict.fromkeys(names, rows) | {"step": 0, "tokens_allowed": 512, "recovering": False}

    def record() -> None:
        ring.append(record_of(plan, [0.0] * 5, 0.0, updates, commit_s=0.0, **state))

    return _seconds(record, steps), _seconds(lambda: metrics.count(updates), steps)


def _seconds(work: Callable[[], None], times: int) -> float:
    found = []
    for _ in range(max(1, times // BATCH)):
        began = time.perf_counter()
        for _ in range(BATCH):
            work()
        found.append((time.perf_counter() - began) / BATCH)
    return median(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args(argv)
    for rows in (int(word) for word in args.rows.split(",")):
        record, counts = costs(rows, args.steps)
        usual = USUAL_STEP_S.get(rows)
        share = f", {(record + counts) / usual:.2%} of a step of {1e3 * usual:g} ms" if usual else ""
        print(f"{rows} rows: record {1e6 * record:.1f} us, counts {1e6 * counts:.1f} us{share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
