"""A benchmark's result as a picture: speed beside the floor, and the percentiles of both latencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_cb.bench.report import PERCENTILES
from hf_cb.metrics.files import write_figure


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draws `summarize`'s dict into a file; its suffix says in which format."""
    from matplotlib.figure import Figure

    engines = summary["engines"]
    figure = Figure(figsize=(12, 1.5 + 0.55 * max(3, len(engines))), layout="constrained")
    speed, ttft, itl = figure.subplots(1, 3, sharey=True)
    names = list(engines)[::-1]  # a chart of lying bars goes from the bottom up
    colors = ["tab:orange" if name == "hf_cb" else "tab:blue" for name in names]
    bars = speed.barh(names, [engines[name]["tok_s"] for name in names], color=colors)
    speed.bar_label(bars, fmt="%.0f", padding=3)
    speed.margins(x=0.15)
    speed.set_title("output tokens per second")
    floor = summary.get("floor")
    if floor:
        speed.axvline(floor["tok_s"], color="black", linestyle="--", label=f"floor: {floor['tok_s']:.0f}")
        speed.legend(loc="lower right")
    _percentiles(ttft, engines, names, "ttft", 1.0, "time to first token (s)")
    _percentiles(itl, engines, names, "itl", 1e3, "time between tokens (ms)")
    load = summary["workload"]
    model = summary.get("model", {})
    of_model = f", {Path(model['name']).name} in {model['dtype']}" if model else ""
    figure.suptitle(
        f"{load['name']}: {load['requests']} requests, {load['prompt_tokens']} prompt and {load['output_tokens']} "
        f"output tokens{of_model}"
    )
    write_figure(figure, path)


def _percentiles(axes: Any, engines: dict[str, Any], names: list[str], which: str, factor: float, title: str) -> None:
    """A mark for each percentile of each engine that tells."""
    for percent, marker in zip(PERCENTILES, "osD", strict=True):
        found = {name: engines[name][f"{which}_p{percent}_s"] for name in names}
        known = {name: factor * value for name, value in found.items() if value is not None}
        axes.plot(list(known.values()), list(known), marker, label=f"p{percent}")
    axes.set_xlim(left=0)
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
