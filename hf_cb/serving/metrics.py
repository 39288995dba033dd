"""`/metrics`: Prometheus' text format, with vLLM's names where they mean the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_cb.metrics.exposition import exposition as metrics_page

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
    manager = service.manager
    engine = metrics_page(manager.metrics, manager.stats, service.config.name).decode()
    return engine + _page(service, own) + "\n".join([*counts.lines(), ""])


def _page(service: Service, samples: Iterable[tuple[str, str, str, float]]) -> str:
    label = f'{{model_name="{_escaped(service.config.name)}"}}'
    lines = []
    for kind, name, text, value in samples:
        lines += [f"# HELP hf_cb:{name} {text}", f"# TYPE hf_cb:{name} {kind}", f"hf_cb:{name}{label} {value:g}"]
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
