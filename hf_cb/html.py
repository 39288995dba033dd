"""Results as a page or a notebook shows them."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_cb.words import duration

if TYPE_CHECKING:
    from hf_cb.core import GenerationOutput

ENDS = {"length": "cut at the longest answer", "cancelled": "stopped", "timeout": "out of time"}

_CARD = (
    "flex: 1 1 18em; min-width: 0; padding: 0.6em 0.8em; border: 1px solid #8884; border-radius: 0.5em; "
    "font-family: system-ui, sans-serif; font-size: 0.9rem"
)


def figures(output: GenerationOutput) -> str:
    """Where an answer's time went, in one line."""
    m = output.metrics
    parts = [
        f"queue {duration(m.queue_s)}",
        f"prefill {duration(m.prefill_s)} for {m.prompt_tokens} tokens",
        f"first token {duration(m.ttft_s)}",
        f"{len(output.generated_tokens)} tokens",
    ]
    if m.itl_s > 0:
        parts.append(f"{1 / m.itl_s:.0f} tokens/s")
    if m.cached_tokens:
        parts.append(f"{m.cached_tokens} from the prefix cache")
    if m.preemptions:
        parts.append(f"gave way {m.preemptions} times")
    if output.finish_reason in ENDS:
        parts.append(ENDS[output.finish_reason])
    return " · ".join(parts)


def card(title: str, text: str, note: str = "", problem: bool = False) -> str:
    """One answer in a frame; the arguments are plain text."""
    colour = "; color: #b42318" if problem else "; opacity: 0.65"
    below = f"<div style='font-size: 0.8em; margin-top: 0.5em{colour}'>{html.escape(note)}</div>" if note else ""
    return (
        f"<div style='{_CARD}'><b>{html.escape(title)}</b>"
        f"<div style='white-space: pre-wrap; overflow-wrap: anywhere'>{html.escape(text)}</div>{below}</div>"
    )


def side_by_side(cards: Iterable[str]) -> str:
    """Frames in rows as wide as the page allows."""
    return f"<div style='display: flex; flex-wrap: wrap; gap: 0.6em; align-items: flex-start'>{''.join(cards)}</div>"


def result_card(output: GenerationOutput, title: str | None = None) -> str:
    """A finished sequence: its text, or its ids where there is no text, and its figures or its error."""
    text = output.text if output.text is not None else f"token ids {list(output.generated_tokens)}"
    note = output.error if output.error is not None else figures(output)
    return card(title or output.request_id, text, note, problem=output.error is not None)
