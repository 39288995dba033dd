"""The engine at this moment, as HTML: requests, KV blocks, the tokens of the last steps, and which budget binds."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hf_cb.errors import describe
from hf_cb.metrics.stats import ManagerStats
from hf_cb.steps import StepRecord

STEPS = 60  # columns of the picture
WIDTH, HEIGHT = 300, 72
STYLE = f"<style>{Path(__file__).with_name('panel.css').read_text()}</style>"

BINDS = {
    "tokens": "The token budget binds: prompts are cut into more steps.",
    "blocks": "KV blocks bind: requests wait until others end.",
    "requests": "The number of requests binds: others wait for a place.",
}


def panel(stats: ManagerStats, records: Sequence[StepRecord], error: BaseException | None = None) -> str:
    """The whole panel, with its style; `error` is what the engine died of."""
    if error is not None:
        return f"{STYLE}<div class='engine dead'>The engine has stopped: {html.escape(describe(error))}</div>"
    records = records[-STEPS:]
    return (
        f"{STYLE}<div class='engine'>"
        f"{_tiles(stats)}{_blocks(stats)}{_steps(records)}<p class='binds'>{_binding(stats, records)}</p>"
        "</div>"
    )


def _tiles(stats: ManagerStats) -> str:
    numbers = {"running": stats.running, "waiting": stats.waiting, "finished": stats.finished}
    tiles = "".join(f"<div><b data-name='{name}'>{value}</b>{name}</div>" for name, value in numbers.items())
    return f"<div class='tiles'>{tiles}</div>"


def _blocks(stats: ManagerStats) -> str:
    held, cached = (100 * n / max(1, stats.blocks) for n in (stats.blocks_held, stats.blocks_cached))
    return (
        f"<div class='caption'><span>KV blocks</span><span><b data-name='held'>{stats.blocks_held}</b> in use, "
        f"{stats.blocks_cached} cached, of {stats.blocks}</span></div>"
        f"<div class='bar'><i class='held' style='width:{held:.1f}%'></i>"
        f"<i class='cached' style='width:{cached:.1f}%'></i></div>"
    )


def _steps(records: Sequence[StepRecord]) -> str:
    """One column a step: prompt tokens on answers' tokens, to the scale of the fullest."""
    most = max((r.query_tokens for r in records), default=0)
    columns, wide = [], WIDTH / STEPS
    for i, record in enumerate(records):
        x, unit = i * wide, HEIGHT / max(8, most)
        decode, prefill = record.decode_tokens * unit, record.prefill_tokens * unit
        for kind, height, base in (("decode", decode, 0.0), ("prefill", prefill, decode)):
            if height:
                height = max(height, 2.0)
                y = HEIGHT - base - height
                columns.append(
                    f"<rect class='{kind}' x='{x:.1f}' y='{y:.1f}' width='{wide - 1:.1f}' height='{height:.1f}'/>"
                )
    allowed = f" of {records[-1].tokens_allowed}" if records else ""
    return (
        f"<div class='caption'><span>Tokens of the last steps</span><span>at most {most}{allowed}</span></div>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' preserveAspectRatio='none' role='img' "
        f"aria-label='tokens of the last steps'>{''.join(columns)}</svg>"
        "<div class='legend'><span class='decode'>answers</span><span class='prefill'>prompts</span></div>"
    )


def _binding(stats: ManagerStats, records: Sequence[StepRecord]) -> str:
    if not stats.running and not stats.waiting:
        return "Idle."
    bound = Counter(r.bound_by for r in records[-10:])
    bound.pop(None, None)
    if not bound:
        return "No budget binds: everybody who asks is served in each step."
    return BINDS.get(str(bound.most_common(1)[0][0]), "")
