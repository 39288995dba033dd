"""A replay as a dict for JSON: what was measured, on what, and what it comes to; and two such dicts made one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_cb.arrivals import Trace
from hf_cb.bench.replay.figures import LATENCIES, Difference, Figures, describe
from hf_cb.bench.replay.formats import Shaped
from hf_cb.bench.replay.settings import Setting, as_json
from hf_cb.bench.replay.slo import Slo
from hf_cb.bench.replay.turn import Turn
from hf_cb.bench.replay.verdict import Pairs, overall, recommend, row_verdict
from hf_cb.config import EngineConfig
from hf_cb.errors import OptionError

# what two files must agree in, and what that is called
FIXED = {"model": "the model or its precision", "machine": "the machine", "trace": "the trace", "held": "the lengths"}


def replayed(shaped: Shaped, held: Mapping[str, Any], speed: float) -> dict[str, Any]:
    """What figures of a replay hold for, beside its `circumstances`."""
    trace = of_trace(shaped.trace) | {"fingerprint": shaped.fingerprint, "speed": speed, "clipped": shaped.clipped}
    return {"trace": trace, "held": dict(held)}


def of_trace(trace: Trace) -> dict[str, Any]:
    """Its size."""
    return {
        "name": trace.name,
        "requests": len(trace.arrivals),
        "seconds": trace.seconds,
        "prompt_tokens": sum(a.prompt_tokens for a in trace.arrivals),
        "output_tokens": sum(a.output_tokens for a in trace.arrivals),
    }


def summarize(
    about: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
    turns: Sequence[Turn],
    slo: Slo | None,
    confidence: float,
) -> dict[str, Any]:
    """Everything, ready for JSON; seconds, tokens and requests a second; an interval is [value, low, high].

    Args:
        about: `circumstances` and what was `replayed`.
        settings: by name, "given" in words and all "options".
        turns: of all settings.
    """
    by_name = {name: [t for t in turns if t.setting == name] for name in settings}
    figures = {name: describe(found, slo, confidence) for name, found in by_name.items()}
    pairs = Pairs(by_name, slo, confidence)
    first, *others = settings
    recommendation = recommend(pairs, figures)
    return {
        **about,
        "slo": None if slo is None else {"limits": slo.limits, "share": slo.share, "words": str(slo)},
        "confidence": confidence,
        "rounds": min(len(found) for found in by_name.values()),
        "settings": {name: {**settings[name], **_figures(figures[name])} for name in settings},
        "differences": [_difference(first, other, pairs.rows(first, other)) for other in others],
        "recommendation": {"setting": recommendation.setting, "evidence": recommendation.evidence},
        "turns": [t.as_dict() for t in turns],
    }


def described(settings: Sequence[Setting], configs: Mapping[str, EngineConfig]) -> dict[str, dict[str, Any]]:
    """Settings as `summarize` takes them."""
    return {s.name: {"given": str(s), "options": as_json(configs[s.name])} for s in settings}


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Turn]]:
    """Two files' circumstances, settings and turns as those of one replay.

    Raises:
        OptionError: they were not made with the same model, precision, machine, trace and lengths.
    """
    for key, what in FIXED.items():
        a, b = first[key], second[key]
        names = ["fingerprint"] if key == "trace" else sorted({*a, *b})
        differ = [f"{name} {a.get(name)!r} and {b.get(name)!r}" for name in names if a.get(name) != b.get(name)]
        if differ:
            raise OptionError(f"These results cannot be compared, since {what} is not the same: {', '.join(differ)}.")
    names = [*first["settings"], *second["settings"]]
    twice = len(set(names)) < len(names)
    settings: dict[str, Any] = {}
    turns: list[Turn] = []
    for number, saved in enumerate((first, second), 1):
        for name, setting in saved["settings"].items():
            called = f"{name} ({number})" if twice else name
            settings[called] = {"given": setting["given"], "options": setting["options"]}
            found = [Turn.from_dict(t) for t in saved["turns"] if t["setting"] == name]
            for turn in found:
                turn.setting = called
            turns += found
    about = {key: first[key] for key in ("date", "versions", *FIXED)}
    about["notes"] = [
        f"measured at different times, {first['date']} and {second['date']}: what the machine did in between is in "
        f"no interval"
    ]
    changed = [
        f"{k} {v} and {second['versions'].get(k)}"
        for k, v in first["versions"].items()
        if v != second["versions"].get(k)
    ]
    if changed:
        about["notes"].append(f"with different versions: {', '.join(changed)}")
    return about, settings, turns


def _figures(found: Figures) -> dict[str, Any]:
    latency = {
        name: {"n": found.n[name], "mean": None if found.mean[name] != found.mean[name] else found.mean[name]}
        | {label: value.as_list() for label, value in found.latency[name].items()}
        for name in LATENCIES
    }
    return {
        "latency": latency,
        "throughput": found.throughput.as_list(),
        "goodput": None if found.goodput is None else found.goodput.as_list(),
        "kept": found.kept,
        "counts": found.counts,
        "preemptions": found.preemptions,
        "cached_tokens": found.cached_tokens,
        "late_s": found.late_s,
        "other_cores": found.other_cores,
        "warnings": found.warnings,
    }


def _difference(a: str, b: str, rows: Sequence[Difference]) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "rows": [
            {
                "name": row.name,
                "a": row.a,
                "b": row.b,
                "change": row.change.as_list(),
                "better": {"a": a, "b": b, None: None}[row.better],
                "verdict": row_verdict(row, a, b),
            }
            for row in rows
        ],
        "verdict": overall(rows, a, b),
    }
