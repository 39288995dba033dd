"""Steps and requests as a trace for https://ui.perfetto.dev or chrome://tracing (the Trace Event Format, in JSON)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_cb.metrics.files import write_file
from hf_cb.metrics.lives import Life, lives_of
from hf_cb.steps import StepRecord

ENGINE, REQUESTS = 1, 2  # "processes"
PHASES = 1  # the engine's first "thread"; the steps themselves have the next ones


def write_perfetto(records: Sequence[StepRecord], path: str | Path) -> None:
    """Writes the trace of these steps.

    There is a track for the phases of steps, one for the steps (two where they overlap), one for each request, and
    counters for the three budgets. Time begins with the first thing that is known.

    Raises:
        HfCbError: the file cannot be written; one that was there is left as it was.
    """
    text = json.dumps({"traceEvents": list(events(records)), "displayTimeUnit": "ms"}, separators=(",", ":"))
    write_file(Path(path), text.encode())


def events(records: Sequence[StepRecord]) -> Iterator[dict[str, Any]]:
    """The trace's events; `ts` and `dur` are microseconds."""
    lives = lives_of(records)
    zero = min([r.started for r in records[:1]] + [life.created for life in lives], default=0.0)
    lanes: list[float] = []  # when the last step on each of the steps' tracks ended
    yield from _name(ENGINE, "engine", 0)
    yield from _thread(ENGINE, PHASES, "phases")
    for record in records:
        yield from _phases(record, zero)
        lane = next((i for i, end in enumerate(lanes) if end <= record.started), len(lanes))
        lanes[lane : lane + 1] = [record.ended]
        yield _slice(f"step {record.step}", zero, record.started, record.ended, ENGINE, lane + 2, _facts(record))
        yield from _counters(record, zero)
    for lane in range(len(lanes)):
        yield from _thread(ENGINE, lane + 2, "steps" if lane == 0 else "steps that overlap")
    if records:  # or the last values would go on for ever
        yield _counter("query tokens", zero, records[-1].ended, {"decode": 0, "prefill": 0})
    yield from _name(REQUESTS, "requests", 1)
    for i, life in enumerate(lives):
        yield from _life(life, zero, i + 1)


def _phases(record: StepRecord, zero: float) -> Iterator[dict[str, Any]]:
    at = record.started
    for name in ("plan", "build", "forward", "sample"):
        took = getattr(record, f"{name}_s")
        yield _slice(name, zero, at, at + took, ENGINE, PHASES, {"step": record.step})
        at += took
    yield _slice("commit", zero, record.ended - record.commit_s, record.ended, ENGINE, PHASES, {"step": record.step})


def _facts(record: StepRecord) -> dict[str, Any]:
    return {
        "tokens": f"{record.query_tokens} of {record.tokens_allowed}",
        "KV blocks": f"{record.blocks_used} of {record.blocks_allowed}",
        "requests": f"{record.running} of {record.requests_allowed}",
        "waiting": record.waiting,
        "bound by": record.bound_by or "nothing",
    }


def _counters(record: StepRecord, zero: float) -> Iterator[dict[str, Any]]:
    at = record.started
    tokens = {"decode": record.decode_tokens, "prefill": record.prefill_tokens}
    yield _counter("query tokens", zero, at, tokens)
    yield _counter("KV blocks", zero, at, {"used": record.blocks_used, "cached": record.blocks_cached})
    yield _counter("requests", zero, at, {"running": record.running, "waiting": record.waiting})


def _life(life: Life, zero: float, track: int) -> Iterator[dict[str, Any]]:
    yield from _thread(REQUESTS, track, life.request_id)
    for span in life.spans:
        args = {"tokens": span.tokens, "step": span.step} if span.step >= 0 else {}
        yield _slice(span.kind, zero, span.begin, span.end, REQUESTS, track, args)
    if life.ended is not None:
        mark = {"name": str(life.reason), "ph": "i", "s": "t", "pid": REQUESTS, "tid": track}
        yield mark | {"ts": _us(life.ended - zero)}


def _slice(
    name: str, zero: float, begin: float, end: float, pid: int, tid: int, args: dict[str, Any]
) -> dict[str, Any]:
    ts = _us(begin - zero)
    return {"name": name, "ph": "X", "ts": ts, "dur": _us(end - zero) - ts, "pid": pid, "tid": tid, "args": args}


def _counter(name: str, zero: float, at: float, values: dict[str, int]) -> dict[str, Any]:
    return {"name": name, "ph": "C", "ts": _us(at - zero), "pid": ENGINE, "args": values}


def _us(seconds: float) -> int:
    """Whole microseconds: slices that follow each other then never overlap by a rounding."""
    return round(1e6 * seconds)


def _name(pid: int, name: str, place: int) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": place}}


def _thread(pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
