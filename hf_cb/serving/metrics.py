"""`/metrics`: Prometheus' text format, with vLLM's names where they mean the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_cb.serving.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpCounts:
    """Answers by path and status."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def add(self, path: str, status: int) -> None:
        self._counts[path, status] += 1

    def lines(self) -> list[str]:
        name = "hf_cb:http_requests_total"
        samples = [f'{name}{{path="{p}",status="{s}"}} {n}' for (p, s), n in sorted(self._counts.items())]
        return [f"# HELP {name} HTTP requests that were answered.", f"# TYPE {name} counter", *samples]


def exposition(service: Service, counts: HttpCounts) -> str:
    """All samples as they are now."""
    stats = service.manager.stats()
    used = stats.blocks_held / max(1, stats.blocks)
    gauges: Mapping[str, tuple[str, float]] = {
        "hf_cb:num_requests_running": ("Requests in the steps.", stats.running),
        "hf_cb:num_requests_waiting": ("Requests that wait for their first step.", stats.waiting),
        "hf_cb:kv_cache_usage_perc": ("Share of the KV blocks in use; 1 is all.", used),
        "hf_cb:http_requests_inside": ("HTTP requests that are being answered.", service.gate.inside),
        "hf_cb:up": ("1 while requests are taken.", float(service.problem() is None)),
    }
    counters: Mapping[str, tuple[str, float]] = {
        "hf_cb:requests_finished_total": ("Sequences that have ended.", stats.finished),
        "hf_cb:generation_tokens_total": ("Tokens that were generated.", stats.tokens),
        "hf_cb:num_steps_total": ("Steps of the engine.", stats.steps),
    }
    lines: list[str] = []
    for kind, samples in (("gauge", gauges), ("counter", counters)):
        for name, (text, value) in samples.items():
            label = f'{{model_name="{_escaped(service.config.name)}"}}'
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{label} {value:g}"]
    return "\n".join([*lines, *counts.lines(), ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
