"""What the benchmark holds engines against: speeds of the machine, the floor, and the picture."""

import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import SHAPE, make_model
from transformers import MixtralConfig, MixtralForCausalLM

import hf_cb
from hf_cb.bench import plot, speeds
from hf_cb.bench.floor import ModelCost, least_time, model_cost
from hf_cb.bench.measured import Measured
from hf_cb.bench.report import summarize, table
from hf_cb.bench.run import BenchResult
from hf_cb.bench.speeds import Speeds, best_of
from hf_cb.bench.sweep import build_tiny
from hf_cb.bench.workload import BenchRequest, Workload, poisson
from hf_cb.metrics.files import check_picture

# a weight read takes 1 s, a token's products 0.001 s, and each token of KV that is read 0.01 s
COST = ModelCost(body=400, head=100, weight_bytes=100.0, kv_bytes=(1,), windows=(None,))
SPEEDS = Speeds(bandwidth=100.0, rate=1e6)


def load(*sizes: tuple[int, int]) -> Workload:
    return Workload("few", [BenchRequest([100 * i + j for j in range(p)], n) for i, (p, n) in enumerate(sizes)])


def test_one_request_reads_all_weights_for_each_token():
    floor = least_time(COST, load((5, 3)), SPEEDS, max_seqs=8)
    assert floor.steps == 3, "the prompt's step makes the first token"
    assert floor.seconds == pytest.approx(3 + 0.01 * (5 + 6 + 7))
    assert floor.tok_s == pytest.approx(3 / floor.seconds)


def test_requests_share_a_step_as_far_as_places_and_budget_go():
    assert least_time(COST, load((5, 3), (5, 3)), SPEEDS, max_seqs=8).steps == 3
    assert least_time(COST, load((5, 3), (5, 3)), SPEEDS, max_seqs=1).steps == 6
    assert least_time(COST, load((5, 1)), SPEEDS, max_seqs=8, budget=2).steps == 3
    assert least_time(COST, load((2, 2), (5, 1)), SPEEDS, max_seqs=8, budget=3).steps == 3, "decode goes first"


def test_many_tokens_are_bound_by_products():
    slow = replace(SPEEDS, rate=1e3)
    floor = least_time(COST, load((10, 1)), slow, max_seqs=1)
    assert floor.seconds == pytest.approx(2 * (10 * 400 + 100) / 1e3 + 0.01 * 10)


def test_a_window_and_a_recurrent_state_read_less():
    cost = replace(COST, kv_bytes=(1, 1, 0), windows=(None, 4, None))
    assert cost.kv_read(10) == 14 and cost.kv_token() == 2


def test_the_clock_waits_for_arrivals():
    late = Workload("late", [BenchRequest([1], 1), BenchRequest([2], 1, arrival=50.0)])
    assert least_time(COST, late, SPEEDS, max_seqs=8).seconds == pytest.approx(51.01)
    assert poisson(load((5, 3)), rate=1.0).requests[0].arrival == 0


def test_a_cached_beginning_is_neither_computed_nor_read_twice():
    both = Workload("shared", [BenchRequest([1, 2, 3, 4], 1), BenchRequest([1, 2, 3, 5], 1)])
    kw: dict[str, Any] = dict(max_seqs=8, budget=5)
    assert least_time(COST, both, SPEEDS, **kw).steps == 2
    cached = least_time(COST, both, SPEEDS, prefix_caching=True, **kw)
    assert cached.steps == 1 and cached.seconds == pytest.approx(1 + 0.01 * (4 + 1 + 3))
    same = Workload("same", [BenchRequest([1, 2], 1)] * 2)
    assert least_time(COST, same, SPEEDS, max_seqs=8, prefix_caching=True).steps == 1, "a last token is left"


@pytest.mark.parametrize("family", ["Llama", "Mixtral", "Gemma2"])
def test_the_cost_of_a_model_is_counted_on_its_weights(family):
    if family == "Mixtral":
        sizes = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, **sizes))
    else:
        model = make_model(family)
    config = model.config
    cost = model_cost(model)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.hidden_size * dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    if family == "Mixtral":
        mlp = mlp * config.num_experts_per_tok + config.hidden_size * config.num_local_experts
    assert cost.body == config.num_hidden_layers * (attention + mlp)
    assert cost.head == config.vocab_size * config.hidden_size
    assert cost.weight_bytes == 4 * (cost.body + cost.head)
    assert cost.kv_bytes == (2 * config.num_key_value_heads * dim * 4,) * config.num_hidden_layers
    assert (None in cost.windows, any(cost.windows)) == (True, family == "Gemma2")


def test_layers_without_a_growing_cache_cost_no_reads():
    found = {
        kind: model_cost(build_tiny(kind.lower(), f"{kind}ForCausalLM", 0)).kv_token() for kind in ("Mamba", "Jamba")
    }
    assert found["Mamba"] == 0 and found["Jamba"] > 0


def test_speeds_are_those_of_the_fastest(monkeypatch, shared_llama):
    monkeypatch.setattr(speeds, "READ_BYTES", 2**22)
    monkeypatch.setattr(speeds, "SECONDS", 0.001)
    found = speeds.measure(shared_llama)
    assert found.bandwidth > 0 and found.rate > 0 and found.product in speeds.PRODUCTS

    def broken(weight: torch.Tensor) -> Any:
        raise RuntimeError("not in this build")

    monkeypatch.setattr(speeds, "PRODUCTS", {"broken": broken, "free": lambda weight: lambda x: None})
    assert speeds.measure(shared_llama).product == "free"
    assert best_of([Speeds(1.0, 5.0, "a"), Speeds(2.0, 4.0, "b")]) == Speeds(2.0, 5.0, "a")


def summary_of() -> dict[str, Any]:
    few = load((5, 3))
    result = BenchResult(
        few, {"hf_cb": [Measured("hf_cb", 3, 4.0, [0.5], [0.1, 0.2], startup_s=2.0, peak_bytes=2**30)]}
    )
    result.rounds["generate"] = [Measured("generate", 3, 8.0)]
    return summarize(result, least_time(COST, few, SPEEDS, max_seqs=1), [SPEEDS, replace(SPEEDS, bandwidth=50.0)])


def test_the_table_holds_everybody_against_the_floor():
    summary = summary_of()
    floor = summary["floor"]["seconds"]
    assert summary["engines"]["hf_cb"]["of_floor"] == pytest.approx(floor / 4)
    text = table(summary)
    assert f"floor: {3 / floor:.1f} tok/s" in text
    assert "the machine's speed varies: 0.0 GB/s" in text
    ours, theirs = (line.split() for line in text.splitlines() if line.startswith(("hf_cb ", "generate")))
    assert ours[3:] == ["0.50", "0.50", "0.50", "100.0", "200.0", "200.0", "2.0", "1.00", f"{floor / 4:.2f}"]
    assert theirs[3:9] == ["-"] * 6


def test_a_plot_that_cannot_be_drawn_is_refused_at_once(monkeypatch, tmp_path):
    with pytest.raises(hf_cb.OptionError, match="no such folder"):
        check_picture(tmp_path / "none" / "x.png", "--plot")
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(hf_cb.OptionError, match='--plot takes .*matplotlib.*pip install "hf-cb.plot."'):
        check_picture(tmp_path / "x.png", "--plot")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_plot(tmp_path):
    with pytest.raises(hf_cb.OptionError, match="must end with"):
        check_picture(tmp_path / "x.warp", "--plot")
    check_picture(tmp_path / "x.svg", "--plot")
    plot.draw(summary_of(), tmp_path / "x.svg")
    assert "<svg" in (tmp_path / "x.svg").read_text()
