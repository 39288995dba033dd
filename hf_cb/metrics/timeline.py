"""Steps and requests as a picture: who was computed when, and how full the steps and the KV cache were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hf_cb.errors import OptionError
from hf_cb.metrics.files import check_picture, write_figure
from hf_cb.metrics.lives import Life, lives_of
from hf_cb.steps import StepRecord

# told apart by colour-blind readers and in grey
COLOURS = {"queued": "#dcdcdc", "prefill": "#f0a04b", "decode": "#2f6fa7", "preempted": "#c9427a"}
LIMIT, CACHED, INK = "#444444", "#b9d3e6", "#333333"
LABELLED = 40  # requests up to which each has its name beside it


def plot_timeline(
    records: Sequence[StepRecord],
    path: str | Path,
    by: Literal["time", "steps"] = "time",
    title: str | None = None,
    width: float = 10.0,
) -> None:
    """Draws requests, tokens in each step against the budget, and KV blocks, one above the other.

    Args:
        records: `manager.trace()`, or a part of it.
        path: its suffix says in which format (.png, .svg, .pdf).
        by: "time", or "steps" of equal width, which shows what was scheduled rather than what it took.
        width: inches.

    Raises:
        OptionError: no matplotlib, folder or such format, or no steps. HfCbError: the file cannot be written.
    """
    path = Path(path)
    check_picture(path, "path")
    if not records:
        raise OptionError("There are no steps to draw: nothing has been generated.")
    import matplotlib
    from matplotlib.figure import Figure

    lives = lives_of(records)
    rows = 0.9 + (0.24 if len(lives) <= LABELLED else 0.08) * min(len(lives), 100)
    with matplotlib.rc_context({"font.size": 9, "axes.edgecolor": "#999999", "svg.fonttype": "none"}):
        figure = Figure(figsize=(width, rows + 3.4), layout="constrained", facecolor="white")
        above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=[rows, 1.5, 1.1])
        axis = _Axis(records, lives, by)
        _requests(above, lives, axis)
        _tokens(middle, records, axis)
        _blocks(below, records, axis)
        below.set_xlabel(axis.label)
        above.set_xlim(axis.begin, axis.end)
        if title:
            figure.suptitle(title, fontsize=11, color=INK)
        write_figure(figure, path, dpi=160)


class _Axis:
    """Where on the horizontal axis a moment is."""

    def __init__(self, records: Sequence[StepRecord], lives: Sequence[Life], by: str) -> None:
        if by not in ("time", "steps"):
            raise OptionError(f'by={by!r} must be "time" or "steps".')
        first = records[0].started
        self.moments = [r.started for r in records] + [records[-1].ended]
        if by == "steps":
            self.label = "step"
            self.places = [float(r.step) for r in records] + [records[-1].step + 1.0]
            self.begin = self.places[0]
        else:
            zero = min([first] + [life.created for life in lives])
            whole = records[-1].ended - zero
            unit, self.label = (1.0, "seconds") if whole >= 2 else (1e3, "milliseconds")
            self.places = [unit * (moment - zero) for moment in self.moments]
            if zero < first:
                self.moments.insert(0, zero)
                self.places.insert(0, 0.0)
            self.begin = 0.0
        self.end = self.places[-1]
        self.by = by

    def at(self, moment: float) -> float:
        import numpy as np

        return float(np.interp(moment, self.moments, self.places))

    def bar(self, begin: float, end: float) -> tuple[float, float]:
        """Left edge and width. By steps, a step is as wide as the way to the next one."""
        left = self.at(begin)
        return left, max(0.0, self.at(end) - left)

    def step(self, record: StepRecord) -> tuple[float, float]:
        return (float(record.step), 1.0) if self.by == "steps" else self.bar(record.started, record.ended)


def _requests(axes: Any, lives: Sequence[Life], axis: _Axis) -> None:
    for kind, colour in COLOURS.items():
        for row, life in enumerate(lives):
            spans = [span for span in life.spans if span.kind == kind]
            if axis.by == "steps" and kind in ("prefill", "decode"):
                bars = [(float(span.step), 1.0) for span in spans]
            else:
                bars = [axis.bar(span.begin, span.end) for span in spans]
            thin = 0.3 if kind in ("queued", "preempted") else 0.0
            if bars:
                edge = {"edgecolor": "white", "linewidth": 0.3 if len(lives) <= LABELLED else 0.0}
                axes.broken_barh(bars, (row - 0.4 + thin / 2, 0.8 - thin), facecolor=colour, **edge)
    marked = [(axis.at(life.first_token), row) for row, life in enumerate(lives) if life.first_token is not None]
    if len(lives) <= LABELLED:
        axes.plot(*zip(*marked, strict=True), "o", color="white", markeredgecolor=INK, markersize=4, clip_on=False)
        axes.set_yticks(range(len(lives)), [life.request_id for life in lives])
    axes.set_ylim(len(lives) - 0.4, -0.6)
    axes.set_ylabel("requests")
    shown = [kind for kind in COLOURS if any(span.kind == kind for life in lives for span in life.spans)]
    _legend(axes, [(kind, COLOURS[kind]) for kind in shown], first_token=len(lives) <= LABELLED)


def _tokens(axes: Any, records: Sequence[StepRecord], axis: _Axis) -> None:
    lefts, widths = zip(*(axis.step(r) for r in records), strict=True)
    decode = [r.decode_tokens for r in records]
    prefill = [r.prefill_tokens for r in records]
    style = {"align": "edge", "edgecolor": "white", "linewidth": 0.3 if len(records) <= 200 else 0.0}
    axes.bar(lefts, decode, widths, color=COLOURS["decode"], **style)
    axes.bar(lefts, prefill, widths, bottom=decode, color=COLOURS["prefill"], **style)
    _limit(axes, records[-1].tokens_allowed, max(r.query_tokens for r in records), "budget", axis)
    axes.set_ylabel("query tokens\nin a step")


def _blocks(axes: Any, records: Sequence[StepRecord], axis: _Axis) -> None:
    edges = [axis.step(r)[0] for r in records] + [axis.end]
    used = [r.blocks_used for r in records]
    axes.stairs(used, edges, fill=True, color=COLOURS["decode"])
    held = [r.blocks_used + r.blocks_cached for r in records]
    axes.stairs(held, edges, baseline=used, fill=True, color=CACHED)
    _limit(axes, records[-1].blocks_allowed, max(held), "all blocks", axis)
    axes.set_ylabel("KV blocks")
    _legend(axes, [("in use", COLOURS["decode"]), ("kept for prefixes", CACHED)])


def _limit(axes: Any, allowed: int, most: int, name: str, axis: _Axis) -> None:
    """A line at what is allowed, or a word where it is far above everything that was used."""
    label = f"{name}: {allowed:,}"
    if allowed <= 3 * most:
        axes.axhline(allowed, color=LIMIT, linestyle=(0, (4, 3)), linewidth=1)
        axes.set_ylim(0, 1.2 * allowed)
        axes.text(axis.begin, allowed, f" {label}", va="bottom", ha="left", color=LIMIT, fontsize=8)
    else:
        axes.set_ylim(0, 1.25 * most)
        axes.text(0.005, 0.97, label, va="top", ha="left", color=LIMIT, fontsize=8, transform=axes.transAxes)
    _plain(axes)


def _legend(axes: Any, entries: Sequence[tuple[str, str]], first_token: bool = False) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=colour, label=label) for label, colour in entries]
    if first_token:
        mark: dict[str, Any] = {
            "marker": "o",
            "color": "white",
            "markeredgecolor": INK,
            "markersize": 4,
            "linestyle": "",
        }
        handles.append(Line2D([], [], label="first token", **mark))
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), frameon=False, borderaxespad=0.1
    )
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(color="#999999", labelcolor=INK)
