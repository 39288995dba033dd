"""A manager's counts and present state in Prometheus' text format, by its own client library (extra `serve`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_cb.errors import OptionError, missing
from hf_cb.metrics.counts import Histogram, Metrics
from hf_cb.metrics.stats import ManagerStats

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "hf_cb:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Collector:
    """What a `prometheus_client` registry asks when it is scraped; it can be registered in anybody's.

    Args:
        metrics: the counts.
        stats: the present state.
        model_name: the label that all of them have, as vLLM's do.
    """

    def __init__(self, metrics: Metrics, stats: Callable[[], ManagerStats], model_name: str = "") -> None:
        self.metrics, self.stats, self.model_name = metrics, stats, model_name

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        m, now = self.metrics, self.stats()
        yield self._gauge("num_requests_running", "Requests that have places in steps.", now.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for one.", now.waiting)
        used = now.blocks_held / now.blocks if now.blocks else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", used)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that have answered.", m.prompt_tokens),
            ("generation_tokens", "Tokens generated.", m.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.", m.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens that were found there.", m.prefix_cache_hits),
            ("num_preemptions", "Times that a request gave its blocks to others.", now.preemptions),
            ("num_steps", "Steps of the engine.", now.steps),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self.model_name], value)
            yield family
        success = CounterMetricFamily(
            f"{PREFIX}request_success", "Requests that have ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(m.finished.copy().items()):
            success.add_metric([self.model_name, reason], count)
        yield success
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From submission to the first token.", m.time_to_first_token),
            ("inter_token_latency_seconds", "Between two tokens of a request.", m.inter_token_latency),
            ("e2e_request_latency_seconds", "From submission to the end.", m.e2e_request_latency),
            ("request_queue_time_seconds", "From submission to the first step.", m.queue_time),
            ("request_prefill_time_seconds", "From the first step to the first token.", m.prefill_time),
            ("request_prompt_tokens", "Prompt lengths.", m.request_prompt_tokens),
            ("request_generation_tokens", "Answer lengths.", m.request_generation_tokens),
        ):
            yield self._histogram(name, text, histogram)

    def _gauge(self, name: str, text: str, value: float) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Any:
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        total, buckets = 0, []
        for bound, count in zip((*histogram.bounds, float("inf")), list(histogram.counts), strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model_name], buckets, histogram.sum)
        return family


def exposition(metrics: Metrics, stats: Callable[[], ManagerStats], model_name: str = "") -> bytes:
    """The whole page for a scrape, to be sent with `CONTENT_TYPE`.

    Raises:
        OptionError: `prometheus-client` is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise OptionError(missing("The page for Prometheus", "serve", error)) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(metrics, stats, model_name))
    page: bytes = generate_latest(registry)
    return page
