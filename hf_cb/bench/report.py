"""A benchmark's result as a dict for JSON, and that dict as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from hf_cb.bench.engines import HfCb, Measured
from hf_cb.bench.run import BenchResult
from hf_cb.core import StepRecord

NEARLY_FULL = 0.9  # of the most requests that a step of nothing but decoding had


def summarize(result: BenchResult) -> dict[str, Any]:
    """All that was measured, ready for JSON; seconds end in `_s`, milliseconds in `_ms`, unknown is None."""
    load = result.workload
    summary: dict[str, Any] = {
        "workload": {
            "name": load.name,
            "requests": len(load.requests),
            "prompt_tokens": load.prompt_tokens,
            "output_tokens": load.output_tokens,
        },
        "engines": {name: _engine(result, name) for name in result.rounds},
        "ratios": {},
        "problems": result.problems,
    }
    if HfCb.name in result.rounds:
        peers = [name for name in result.rounds if name != HfCb.name]
        summary["ratios"] = {f"{HfCb.name} / {peer}": result.ratio(HfCb.name, peer) for peer in peers}
        summary["decode_steps"] = decode_steps([s for run in result.rounds[HfCb.name] for s in run.steps])
    return summary


def decode_steps(steps: Sequence[StepRecord]) -> dict[str, dict[str, float]]:
    """Mean times of the steps that only decode: of all of them, and of the nearly full ones.

    `host_ms` is the engine's own Python: plan, build and commit. Empty if there was no such step.
    """
    pure = [s for s in steps if s.prefill_tokens == 0 and s.decode_tokens == s.requests > 0]
    if not pure:
        return {}
    most = max(s.requests for s in pure)
    return {"all": _means(pure), "full": _means([s for s in pure if s.requests >= NEARLY_FULL * most])}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` of all do not exceed; None if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] if ordered else None


def table(summary: dict[str, Any]) -> str:
    """`summarize`'s dict for people; `first_token` is in it if somebody has put it there."""
    load = summary["workload"]
    lines = [
        f"workload {load['name']}: {load['requests']} requests, {load['prompt_tokens']} prompt and "
        f"{load['output_tokens']} output tokens",
        "",
        f"{'engine':<14}{'tok/s':>9}{'seconds':>9}{'TTFT p50':>10}{'p95 (s)':>9}{'ITL p50':>10}{'p95 (ms)':>10}",
    ]
    for name, engine in summary["engines"].items():
        latencies = (
            f"{_show(engine['ttft_p50_s'], 1, 3):>10}{_show(engine['ttft_p95_s'], 1, 3):>9}"
            f"{_show(engine['itl_p50_s'], 1e3, 2):>10}{_show(engine['itl_p95_s'], 1e3, 2):>10}"
        )
        lines.append(f"{name:<14}{engine['tok_s']:>9.1f}{engine['seconds']:>9.2f}{latencies}")
    if summary["ratios"]:
        ratios = [f"{name} {ratio:.2f}" for name, ratio in summary["ratios"].items()]
        lines += ["", f"ratios: {', '.join(ratios)}"]
    if summary.get("decode_steps"):
        lines += ["", "hf_cb, steps that only decode (means):"]
        lines += [f"  {which:<5} {_show_steps(means)}" for which, means in summary["decode_steps"].items()]
    first = summary.get("first_token")
    if first:
        lines += [
            "",
            f"from import hf_cb to the first token, model loaded: {first['total_s']:.2f} s "
            f"(import {first['import_s']:.2f}, accelerate {first['accelerate_s']:.2f}, "
            f"one token {first['generate_s']:.2f})",
        ]
    lines += [f"PROBLEM {problem}" for problem in summary["problems"]]
    return "\n".join(lines)


def _engine(result: BenchResult, name: str) -> dict[str, Any]:
    runs = result.rounds[name]
    ttft = [t for run in runs for t in run.ttft]
    itl = [t for run in runs for t in run.itl]
    return {
        "tok_s": result.tok_s(name),
        "seconds": statistics.median(run.seconds for run in runs),
        "output_tokens": runs[0].output_tokens,
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p95_s": percentile(ttft, 95),
        "itl_p50_s": percentile(itl, 50),
        "itl_p95_s": percentile(itl, 95),
        "runs": [_run(run) for run in runs],
    }


def _run(run: Measured) -> dict[str, float]:
    return {"tok_s": run.tok_s, "seconds": run.seconds, "output_tokens": run.output_tokens}


def _means(steps: list[StepRecord]) -> dict[str, float]:
    means = {"steps": len(steps), "requests": statistics.fmean(s.requests for s in steps)}
    for name in ("host", "plan", "build", "commit", "forward", "sample"):
        means[f"{name}_ms"] = 1e3 * statistics.fmean(getattr(s, f"{name}_s") for s in steps)
    return means


def _show(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def _show_steps(means: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {means[f'{name}_ms']:.3f}" for name in ("plan", "build", "commit"))
    return (
        f"{means['host_ms']:.3f} ms of its own Python ({parts}), forward {means['forward_ms']:.2f}, sample "
        f"{means['sample_ms']:.2f}; {means['steps']:.0f} steps of {means['requests']:.1f} requests"
    )
