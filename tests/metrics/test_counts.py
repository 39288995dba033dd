"""What Prometheus is told of a manager: counted by hand, and read back by its own parser."""

from __future__ import annotations

from typing import Any

import pytest
from clocked import Clocked
from tiny_models import greedy, make_prompts

from hf_cb import EngineConfig
from hf_cb.bench import record_cost
from hf_cb.core import Update
from hf_cb.metrics.counts import Histogram, Metrics
from hf_cb.metrics.exposition import exposition


def test_histogram_buckets_hold_their_upper_bound() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(0.0, times=3)
    assert (histogram.counts, histogram.sum) == ([5, 2, 1], 14.0)


def test_counts_of_scripted_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    c, metrics = Clocked(monkeypatch, max_num_seqs=2), Metrics()
    c.submit("a", 10, 3)
    c.submit("b", [900] * 3, 3)
    c.submit("c", 10, 1)
    while c.engine.has_work:
        metrics.count(c.engine.step())
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (23, 7)
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (23, 8)
    assert metrics.finished == {"length": 3}
    # a step of 13 tokens, two of two, and one of two for c, which had found the rest
    assert metrics.time_to_first_token.sum == pytest.approx(0.023 * 2 + (0.023 + 0.012 * 3))
    assert metrics.inter_token_latency.sum == pytest.approx(0.012 * 4)
    assert sum(metrics.inter_token_latency.counts) == 4
    assert metrics.queue_time.sum == pytest.approx(0.023 + 0.012 * 2)
    assert metrics.e2e_request_latency.sum == pytest.approx(0.047 * 2 + 0.059)
    assert metrics.request_generation_tokens.sum == 7


def test_right_drafts_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Right:
        def propose(self, request: Any, most: int) -> list[int]:
            return [request.token_ids[-1] + 1]

    c, metrics = Clocked(monkeypatch, drafts=Right()), Metrics()
    c.submit("a", 3, 7)
    while c.engine.has_work:
        metrics.count(c.engine.step())
    assert metrics.generation_tokens == 7
    assert sum(metrics.inter_token_latency.counts) == 6 and metrics.inter_token_latency.counts[0] == 3


def test_requests_that_the_engine_took_with_it_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    c, metrics = Clocked(monkeypatch), Metrics()
    r = c.submit("a", 3, 7)
    metrics.count(c.engine.step())
    metrics.count([Update(r, [])], died=True)
    assert metrics.finished == {"error": 1}


@pytest.mark.usefixtures("patched")
def test_a_managers_page(shared_llama) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="the extra `serve` is not installed")
    config = EngineConfig(block_size=4, num_blocks=12, max_num_seqs=4)
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():  # they begin together, and one has to give way
            handles = [manager.submit(p, greedy(9)) for p in make_prompts([5, 9, 13])]
        manager.submit(make_prompts([3])[0], greedy(2), stop_strings=None).result()
        for handle in handles:
            handle.result()
        page = exposition(manager.metrics, manager.stats, "tiny")
        preemptions, steps = manager.stats().preemptions, manager.stats().steps
    families = list(parser.text_string_to_metric_families(page.decode()))
    samples = {(s.name, s.labels.get("finished_reason") or s.labels.get("le")): s for f in families for s in f.samples}
    assert all(s.labels["model_name"] == "tiny" for s in samples.values())
    want = {
        "hf_cb:num_requests_running": 0,
        "hf_cb:num_requests_waiting": 0,
        "hf_cb:kv_cache_usage_perc": 0,
        "hf_cb:prompt_tokens_total": 30,
        "hf_cb:generation_tokens_total": 29,
        "hf_cb:prefix_cache_queries_total": 30,
        "hf_cb:num_preemptions_total": preemptions,
        "hf_cb:num_steps_total": steps,
        "hf_cb:time_to_first_token_seconds_count": 4,
        "hf_cb:inter_token_latency_seconds_count": 25,
        "hf_cb:e2e_request_latency_seconds_count": 4,
    }
    assert {name: samples[name, None].value for name in want} == want
    assert preemptions > 0
    assert samples["hf_cb:request_success_total", "length"].value == 4
    assert samples["hf_cb:time_to_first_token_seconds_bucket", "+Inf"].value == 4


def test_the_cost_of_records_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert record_cost.main(["--rows", "1,3", "--steps", "50"]) == 0
    one, three = capsys.readouterr().out.splitlines()
    assert one.startswith("1 rows: record ") and "% of a step of 5.6 ms" in one
    assert three.startswith("3 rows: record ")
