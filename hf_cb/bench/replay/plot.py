"""A replay as a picture: how the latencies are spread, side by side, and what was waiting and running when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_cb.bench.replay.figures import values_of
from hf_cb.bench.replay.turn import Served, Turn
from hf_cb.metrics.files import write_figure

SHOWN = {
    "ttft": ("time to first token (s)", 1.0),
    "itl": ("time between tokens (ms)", 1e3),
    "e2e": ("end to end (s)", 1),
}


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """Draws `summarize`'s dict into a file; its suffix says in which format."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    turns = [Turn.from_dict(saved) for saved in summary["turns"]]
    names = list(summary["settings"])
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    grid = figure.add_gridspec(3, 3, height_ratios=(2, 1, 1))
    for column, (which, (title, factor)) in enumerate(SHOWN.items()):
        axes = figure.add_subplot(grid[0, column])
        for name in names:
            values = [v for t in turns if t.setting == name for r in t.requests if r.done for v in values_of(r, which)]
            if values:
                axes.ecdf(np.array(values) * factor, label=name)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(title)
        axes.grid(alpha=0.3)
        if column == 0:
            axes.set_ylabel("share of the values up to there")
            axes.legend()
    waiting, running = figure.add_subplot(grid[1, :]), figure.add_subplot(grid[2, :])
    for name in names:
        first = next(t for t in turns if t.setting == name)
        for axes, spans in ((waiting, _waiting(first.requests)), (running, _running(first.requests))):
            at, level = levels(spans)
            axes.step(at, level, where="post", label=name)
    for axes, title in ((waiting, "requests waiting for their first step"), (running, "requests running")):
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    running.set_xlabel("seconds, first round")
    trace, model = summary["trace"], summary["model"]
    figure.suptitle(
        f"{trace['name']}: {trace['requests']} requests over {trace['seconds']:.0f} s, {Path(model['name']).name} in "
        f"{model['dtype']} on {summary['machine']['gpu'] or summary['machine']['cpu']}"
    )
    write_figure(figure, path)


def levels(spans: Sequence[tuple[float, float]]) -> tuple[list[float], list[int]]:
    """How many spans of time are open, from each moment at which that changes."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    at, level = [0.0], [0]
    for moment, change in changes:
        at.append(moment)
        level.append(level[-1] + change)
    return at, level


def _waiting(requests: Sequence[Served]) -> list[tuple[float, float]]:
    return [(r.due, r.due + r.queue_s) for r in requests if r.queue_s == r.queue_s]


def _running(requests: Sequence[Served]) -> list[tuple[float, float]]:
    return [(r.due + r.queue_s, r.due + r.e2e_s) for r in requests if r.queue_s == r.queue_s and r.e2e_s == r.e2e_s]
