"""What a manager has done since it was made, in counters and histograms that cost a step microseconds.

The names are vLLM's where they mean the same, so that its dashboards need another prefix and nothing else. `exposition`
has them as Prometheus reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from hf_cb.core import Request, Update

# upper bounds in seconds; each histogram has one bucket more, for what is above
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
E2E_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """How many values lie at or below each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Metrics:
    """Fed with each step's updates, by the thread that delivers them; read by anybody."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0  # prompt tokens of requests that have started
        self.prefix_cache_hits = 0  # those of them that were found
        self.finished: Counter[str] = Counter()  # requests by finish_reason
        self.time_to_first_token = Histogram(TTFT_S)
        self.inter_token_latency = Histogram(ITL_S)
        self.e2e_request_latency = Histogram(E2E_S)
        self.queue_time = Histogram(E2E_S)
        self.prefill_time = Histogram(E2E_S)
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)

    def count(self, updates: Iterable[Update], died: bool = False) -> None:
        """A step's news; `died`: the engine has, and all of these requests have failed with it."""
        before: Counter[float] = Counter()  # rows of a step mostly had their last token at the same moment
        now = 0.0
        for update in updates:
            request, new = update.request, len(update.new_ids)
            if new:
                self.generation_tokens += new
                times = request.timestamps
                now = times[-1]
                if len(times) > new:
                    before[times[-new - 1]] += 1
                else:
                    self._first(request)
                if new > 1:
                    self.inter_token_latency.observe(0.0, new - 1)  # drafts that were right
            if died or update.finished:
                self._last(request, died)
        for then, rows in before.items():
            self.inter_token_latency.observe(now - then, rows)

    def _first(self, request: Request) -> None:
        assert request.first_token is not None
        prompt, cached = len(request.prompt_ids), request.metrics.cached_tokens
        self.prompt_tokens += prompt
        self.prefix_cache_queries += prompt
        self.prefix_cache_hits += cached
        self.time_to_first_token.observe(request.first_token - request.created)

    def _last(self, request: Request, died: bool) -> None:
        self.finished["error" if died else request.finish_reason or "error"] += 1
        m = request.metrics
        for histogram, value in (
            (self.e2e_request_latency, m.e2e_s),
            (self.queue_time, m.queue_s),
            (self.prefill_time, m.prefill_s),
        ):
            if value == value:  # not NaN: it is known
                histogram.observe(value)
        self.request_prompt_tokens.observe(len(request.prompt_ids))
        self.request_generation_tokens.observe(request.num_output)
