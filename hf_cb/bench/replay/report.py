"""`summarize`'s dict as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_cb.bench.replay.figures import NAMES
from hf_cb.bench.replay.verdict import LABELS

HEADS = {"queue": "queue", "prefill": "prefill", "ttft": "TTFT", "itl": "ITL", "e2e": "e2e"}
RATES = {"throughput": (1.0, 1, "tok/s"), "goodput": (1.0, 2, "1/s")}
WIDTH = 24
MOST = 9.99  # a bound beyond it says no more than this one


def table(summary: Mapping[str, Any]) -> str:
    """All of it."""
    trace, rounds, settings = summary["trace"], summary["rounds"], summary["settings"]
    lines = [
        f"{trace['name']}: {trace['requests']} requests over {trace['seconds']:.1f} s, {trace['prompt_tokens']} prompt "
        f"and {trace['output_tokens']} output tokens; {rounds} round{'s' * (rounds > 1)}, "
        f"{summary['confidence']:.0%} intervals"
    ]
    if trace["clipped"]:
        lines.append(f"{trace['clipped']} of the requests were shortened by --max-len")
    lines += summary.get("notes", [])
    if rounds == 1:
        lines.append("one round: intervals tell of other requests, and nothing of the machine; use --repeat")
    for name, found in settings.items():
        lines += ["", *_setting(name, found, summary["slo"])]
    for difference in summary["differences"]:
        lines += ["", *_difference(difference, summary["confidence"])]
    if len(settings) > 1:
        lines += ["", *_recommendation(summary["recommendation"])]
    return "\n".join(lines)


def _setting(name: str, found: Mapping[str, Any], slo: Mapping[str, Any] | None) -> list[str]:
    counts = found["counts"]
    rest = ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if outcome != "done" and n)
    given = "" if found["given"] == name else f"  ({found['given']})"
    lines = [
        f"{name}{given}",
        f"  {cell(found['throughput'], 1, 1)} tok/s; {counts['done']} requests served{', ' + rest if rest else ''}; "
        f"{found['preemptions']} preemptions, {found['cached_tokens']} prompt tokens from the cache",
    ]
    if slo is not None:
        lines.append(f"  {found['kept']:.1%} had {slo['words']}; goodput {cell(found['goodput'], 1, 2)} requests/s")
    lines.append(f"  {'':<11}{'n':>6}{'mean':>9}" + "".join(f"{label:>{WIDTH}}" for label in NAMES))
    for key, row in found["latency"].items():
        factor, digits, unit = unit_for(row["p95"][0])
        mean = "-" if row["mean"] is None else f"{row['mean'] * factor:.{digits}f}"
        cells = "".join(f" {cell(row[label], factor, digits):>{WIDTH - 1}}" for label in NAMES)
        lines.append(f"  {HEADS[key] + ' ' + unit:<11}{row['n']:>6}{mean:>9}{cells}")
    return lines + [f"  WARNING {warning}" for warning in found["warnings"]]


def _difference(found: Mapping[str, Any], confidence: float) -> list[str]:
    a, b = found["a"], found["b"]
    wide = 2 + max(12, *(len(_short(name)) for name in (a, b)))
    lines = [
        f"{b} against {a}, the same requests ({confidence:.0%} for all rows together)",
        f"  {'':<12}{_short(a):>{wide}}{_short(b):>{wide}}{'change':>9}{'interval':>22}",
    ]
    for row in found["rows"]:
        factor, digits, unit = RATES.get(row["name"]) or unit_for(max(row["a"], row["b"]))
        change, low, high = row["change"]
        bounds = "-" if low is None else f"{low:+.1%} .. {'>' * (high > MOST)}{min(high, MOST):+.1%}"
        values = [f"{row[side] * factor:.{digits}f} {unit}" for side in ("a", "b")]
        lines.append(
            f"  {LABELS[row['name']]:<12}{values[0]:>{wide}}{values[1]:>{wide}}{change:>+9.1%}{bounds:>22}  "
            f"{row['verdict']}"
        )
    return [*lines, f"  {found['verdict']}"]


def _recommendation(found: Mapping[str, Any]) -> list[str]:
    head = f"take {found['setting']}" if found["setting"] else "no setting is to be preferred by this measurement"
    return [head, *(f"  {line}" for line in found["evidence"])]


def cell(interval: Sequence[float | None], factor: float, digits: int) -> str:
    """A figure and its bounds."""
    value, low, high = interval
    if value is None:
        return "-"
    shown = f"{value * factor:.{digits}f}"
    return shown if low is None or high is None else f"{shown} [{low * factor:.{digits}f}, {high * factor:.{digits}f}]"


def unit_for(seconds: float | None) -> tuple[float, int, str]:
    """Factor, digits and name of the unit for times like this one."""
    return (1e3, 1, "ms") if seconds is None or seconds < 1 else (1.0, 2, "s")


def _short(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "\N{HORIZONTAL ELLIPSIS}"
