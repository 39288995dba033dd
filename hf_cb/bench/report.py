"""A benchmark's result as a dict for JSON, and that dict as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from hf_cb.bench.engines import HfCb
from hf_cb.bench.floor import Floor
from hf_cb.bench.measured import Measured
from hf_cb.bench.others import disturbed
from hf_cb.bench.run import BenchResult
from hf_cb.bench.speeds import Speeds, best_of
from hf_cb.steps import StepRecord

PERCENTILES = (50, 95, 99)
STEADY = 0.9  # of the best speed: what is below is worth a word
NEARLY_FULL = 0.9  # of the most requests that a step of nothing but decoding had


def summarize(result: BenchResult, floor: Floor | None = None, seen: Sequence[Speeds] = ()) -> dict[str, Any]:
    """All that was measured, ready for JSON; seconds end in `_s`, milliseconds in `_ms`, unknown is None.

    `seen` has the machine's speeds, each time they were measured; the floor was made of the best.
    """
    load = result.workload
    summary: dict[str, Any] = {
        "workload": {
            "name": load.name,
            "requests": len(load.requests),
            "prompt_tokens": load.prompt_tokens,
            "output_tokens": load.output_tokens,
            "last_arrival_s": max(r.arrival for r in load.requests),
        },
        "engines": {name: _engine(result, name, floor) for name in result.rounds},
        "ratios": {},
        "unable": result.unable,
        "problems": result.problems,
    }
    if floor is not None:
        speeds = best_of(seen)
        summary["floor"] = {
            "tok_s": floor.tok_s,
            "seconds": floor.seconds,
            "bandwidth_gb_s": speeds.bandwidth / 1e9,
            "product_gflop_s": speeds.rate / 1e9,
            "product": speeds.product,
            "seen": [{"bandwidth_gb_s": s.bandwidth / 1e9, "product_gflop_s": s.rate / 1e9} for s in seen],
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
        f"{'engine':<13}{'tok/s':>8}{'seconds':>9}  {'TTFT p50':>8}{'p95':>7}{'p99 s':>7}  {'ITL p50':>8}{'p95':>8}"
        f"{'p99 ms':>8}  {'start s':>7}{'peak GiB':>9}{'of floor':>9}",
    ]
    for name, engine in summary["engines"].items():
        ttft = [_show(engine[f"ttft_p{p}_s"], 1, 2) for p in PERCENTILES]
        itl = [_show(engine[f"itl_p{p}_s"], 1e3, 1) for p in PERCENTILES]
        lines.append(
            f"{name:<13}{engine['tok_s']:>8.1f}{engine['seconds']:>9.2f}  {ttft[0]:>8}{ttft[1]:>7}{ttft[2]:>7}  "
            f"{itl[0]:>8}{itl[1]:>8}{itl[2]:>8}  {_show(engine['startup_s'], 1, 1):>7}"
            f"{_show(engine['peak_bytes'], 2**-30, 2):>9}{_show(engine['of_floor'], 1, 2):>9}"
        )
    lines += [f"{name:<13} cannot: {why}" for name, why in summary["unable"].items()]
    if summary.get("floor"):
        lines += ["", *_floor_lines(summary["floor"])]
    others = max((engine["other_cores"] or 0.0 for engine in summary["engines"].values()), default=0.0)
    if (said := disturbed(others)) is not None:
        lines += ["", f"{said}: measure on a quiet machine"]
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


def _floor_lines(floor: dict[str, Any]) -> Iterator[str]:
    yield (
        f"floor: {floor['tok_s']:.1f} tok/s, {floor['seconds']:.2f} s, from {floor['bandwidth_gb_s']:.1f} GB/s and "
        f"{floor['product_gflop_s']:.0f} GFLOP/s ({floor['product']})"
    )
    worst = [min(seen[key] for seen in floor["seen"]) for key in ("bandwidth_gb_s", "product_gflop_s")]
    if worst[0] < STEADY * floor["bandwidth_gb_s"] or worst[1] < STEADY * floor["product_gflop_s"]:
        yield f"the machine's speed varies: {worst[0]:.1f} GB/s and {worst[1]:.0f} GFLOP/s were seen as well"


def _engine(result: BenchResult, name: str, floor: Floor | None) -> dict[str, Any]:
    runs = result.rounds[name]
    ttft = [t for run in runs for t in run.ttft]
    itl = [t for run in runs for t in run.itl]
    seconds = statistics.median(run.seconds for run in runs)
    return {
        "tok_s": result.tok_s(name),
        "seconds": seconds,
        "output_tokens": runs[0].output_tokens,
        **{f"ttft_p{p}_s": percentile(ttft, p) for p in PERCENTILES},
        **{f"itl_p{p}_s": percentile(itl, p) for p in PERCENTILES},
        "startup_s": _middle([run.startup_s for run in runs]),
        "peak_bytes": max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None),
        "of_floor": None if floor is None else floor.seconds / seconds,
        "other_cores": max((run.others for run in runs if run.others is not None), default=None),
        "first_tokens_agree": result.agreed(name),
        "about": runs[0].about,
        "runs": [_run(run) for run in runs],
    }


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


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
