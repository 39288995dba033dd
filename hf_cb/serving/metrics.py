"""`/metrics`: Prometheus' text format, with vLLM's names where they mean the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
    """All samples as they are now: the engine's, and the server's own."""
    own = [
        ("gauge", "http_requests_inside", "HTTP requests that are being answered.", service.gate.inside),
        ("gauge", "up", "1 while requests are taken.", service.problem() is None),
    ]
    return _engine_page(service) + _page(service, own) + "\n".join([*counts.lines(), ""])


def _engine_page(service: Service) -> str:
    stats = service.manager.stats()
    used = stats.blocks_held / max(1, stats.blocks)
    samples = [
        ("gauge", "num_requests_running", "Requests in the steps.", stats.running),
        ("gauge", "num_requests_waiting", "Requests that wait for their first step.", stats.waiting),
        ("gauge", "kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", used),
        ("counter", "requests_finished_total", "Sequences that have ended.", stats.finished),
        ("counter", "generation_tokens_total", "Tokens that were generated.", stats.tokens),
        ("counter", "num_steps_total", "Steps of the engine.", stats.steps),
    ]
    return _page(service, samples)


def _page(service: Service, samples: Iterable[tuple[str, str, str, float]]) -> str:
    label = f'{{model_name="{_escaped(service.config.name)}"}}'
    lines = []
    for kind, name, text, value in samples:
        lines += [f"# HELP hf_cb:{name} {text}", f"# TYPE hf_cb:{name} {kind}", f"hf_cb:{name}{label} {value:g}"]
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
