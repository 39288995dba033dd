"""`hf-cb plan`: sizes told from a config alone are those of the engine that the loaded model gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import make_model

from hf_cb.attention import interception
from hf_cb.bench import sweep
from hf_cb.bench.floor import ModelCost
from hf_cb.bench.forecast import Load, expect, forecast
from hf_cb.bench.speeds import Speeds, largest_weights
from hf_cb.cli import main
from hf_cb.config import EngineConfig
from hf_cb.errors import OptionError, UnsupportedModelError
from hf_cb.manager.build import build_engine
from hf_cb.models.outline import outline
from hf_cb.models.plan import Room

CPU = Room(torch.device("cpu"), 2**34)
LOAD = Load(prompt=60, output=20, requests=10)


@pytest.fixture(autouse=True)
def seen() -> Any:
    with interception.installed():
        yield


def folder_of(config: Any, path: Path) -> str:
    config.save_pretrained(path)
    return str(path)


def big_llama(path: Path, **changes: Any) -> str:
    """A config with 32 layers of 8 KV heads of 128."""
    shape = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
    rest = dict(num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, dtype="bfloat16")
    return folder_of(transformers.LlamaConfig(**shape | rest | changes), path)


def allocated(engine: Any) -> int:
    """Bytes of the tensors that an engine holds for keys and values."""
    runner = engine.runner
    tensors = [t for s in runner.storages for t in (getattr(s, "cache", None) or runner.backend.tensors(s))]
    return sum(t.nbytes for t in tensors if t is not None)


def test_the_numbers_of_the_text_book(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = big_llama(tmp_path)
    assert main(["plan", folder, "--no-speed", "--device", "cpu", "--kv-budget", "1GiB", "--memory", "20GiB"]) == 0
    said = capsys.readouterr().out
    assert "KV cache: 131,072 bytes a token in 32 layers with full attention (8 KV heads of 128, bfloat16)" in said
    assert "131,072 bytes a token in all layers, 1.00 GiB for 8,192 tokens" in said
    assert "weights: 14.96 GiB of 20.00 GiB free on cpu\n" in said
    assert "256 blocks of 32 tokens and 4,194,304 bytes (kv_budget=1073741824 bytes" in said
    # 639 tokens have keys: 19 full blocks and 31 tokens of another
    assert "a request of 512 + 128 tokens: 20 blocks (80.00 MiB), 0.2% of them unused at its end (room for 1 in" in said
    assert "running together: 12 of 64; at most 102 by tokens" in said and "12 by blocks (256 KV blocks)" in said
    assert "first budget to bind: blocks" in said


def test_quantised_keys_and_values_take_half(tmp_path: Path) -> None:
    model = outline(big_llama(tmp_path, num_hidden_layers=2))
    whole, half = (forecast(model, EngineConfig(kv_dtype=d), LOAD, CPU).token_bytes for d in (None, "int8"))
    assert whole == 8192 and whole // 2 < half <= 0.55 * whole


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v2", "lfm2", "qwen3_5_text", "phi3", "gpt2", "falcon"],
)
def test_a_plan_is_what_the_engine_allocates(name: str, tmp_path: Path) -> None:
    classes = sweep.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name)
    if classes is None:
        pytest.skip(f"this transformers has no {name}")
    real = sweep.build_tiny(name, classes if isinstance(classes, str) else classes[0], seed=0)
    real.save_pretrained(tmp_path)
    options = EngineConfig(block_size=4, kv_budget="1MiB", max_batch_tokens=16, max_num_seqs=4)
    plan = forecast(outline(str(tmp_path), "float32"), options, LOAD, CPU)
    engine = build_engine(real, options)
    assert plan.plan.config.num_blocks == engine.config.num_blocks
    assert plan.plan.groups == engine.kv.groups
    assert plan.request_blocks == engine.kv.blocks_for(LOAD.cached, 16)
    if plan.path == "paged":
        assert plan.kv_bytes == allocated(engine) > 0
        states = engine.runner.trace.recurrent
        assert plan.state_bytes == (states.state_bytes if states else 0)
    else:
        assert name == "falcon" and not plan.groups


def test_memory_is_shared_out_as_by_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama", max_position_embeddings=10_000)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("hf_cb.models.plan.free_memory", lambda device: 2**24)
    engine = build_engine(model, EngineConfig())
    plan = forecast(outline(str(tmp_path)), EngineConfig(), LOAD, Room(torch.device("cpu"), 2**24))
    assert plan.plan.config == engine.config


@pytest.mark.parametrize(
    ("options", "binding", "together"),
    [
        (dict(max_batch_tokens=40, num_blocks=1000), "tokens", 10),
        (dict(max_batch_tokens=800, num_blocks=20 * 5 + 3), "blocks", 5),
        (dict(max_batch_tokens=800, num_blocks=1000, max_num_seqs=7), "requests", 7),
        (dict(max_batch_tokens=800, num_blocks=1000), None, 20),
        (dict(max_batch_tokens=800, num_blocks=19), "blocks", 0),
    ],
)
def test_the_first_budget_to_bind(tmp_path: Path, options: dict[str, Any], binding: str | None, together: int) -> None:
    model = outline(folder_of(make_model("Llama").config, tmp_path))
    plan = forecast(model, EngineConfig(block_size=4, **options), Load(60, 20, 20), CPU)
    assert (plan.binding, plan.together) == (binding, together)


def test_of_a_window_only_what_it_reaches_is_kept(tmp_path: Path) -> None:
    model = outline(folder_of(make_model("Mistral").config, tmp_path))  # a window of 8, and nothing else
    plan = forecast(model, EngineConfig(block_size=4, max_batch_tokens=8), LOAD, CPU)
    assert [(g.window, g.layers) for g in plan.groups] == [(8, 4)]
    assert plan.request_blocks == 5  # 8 - 1 + 8 tokens, wherever they begin
    assert plan.waste == pytest.approx(1 - 8 / 12)  # at the end 8 keys are needed, in at most 3 blocks


def test_expected_steps_follow_from_the_speeds(tmp_path: Path) -> None:
    model = outline(folder_of(make_model("Llama").config, tmp_path))
    plan = forecast(model, EngineConfig(block_size=4, max_batch_tokens=100), LOAD, CPU)
    plan.cost = ModelCost(body=1000, head=500, weight_bytes=3000, kv_bytes=(10,), windows=(None,))
    steps = expect(plan, Speeds(bandwidth=1e3, rate=2e3))
    assert steps.one == pytest.approx(3000 / 1e3 + 70 * 10 / 1e3)
    assert steps.all == pytest.approx(2 * 10 * 1500 / 2e3 + 10 * 70 * 10 / 1e3)
    assert steps.prompts == pytest.approx(2 * (100 * 1000 + 500) / 2e3)
    assert steps.tok_s == pytest.approx(200 / steps.whole)


def test_a_model_that_does_not_fit_is_planned_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = big_llama(tmp_path, num_hidden_layers=40, hidden_size=8192, num_attention_heads=64)
    assert main(["plan", folder, "--no-speed", "--device", "cpu", "--memory", "16GiB"]) == 0
    said = capsys.readouterr().out
    assert "163,840 bytes a token" in said and "free on cpu: they do not fit" in said
    assert "no room for a KV cache: the one above is what these requests would need" in said
    assert "(what these requests need)" in said


def test_the_machine_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = big_llama(tmp_path, num_hidden_layers=2)
    shapes = [(w.shape, w.dtype, w.device) for w in largest_weights(outline(folder), torch.device("cpu"))]
    assert shapes == [((4096, 4096), torch.bfloat16, torch.device("cpu"))]  # cut: the largest is 14,336 wide
    monkeypatch.setattr("hf_cb.bench.speeds.measure", lambda model, device: Speeds(1e9, 2e9, "torch"))
    assert main(["plan", folder, "--device", "cpu", "--prompt", "40", "--output", "9", "--memory", "20GiB"]) == 0
    said = capsys.readouterr().out
    assert "measured: 1.0 GB/s read, 2 GFLOP/s (torch)" in said
    assert "a step takes at least 1.92 s for one answer" in said  # 1.92 GB of weights, the embedding's aside
    for cores, is_said in ((0.05, False), (1.5, True)):
        monkeypatch.setattr("hf_cb.bench.others.OtherWork.cores", lambda self, cores=cores: cores)
        assert main(["plan", folder, "--device", "cpu", "--memory", "20GiB"]) == 0
        assert ("other programs kept up to 1.5 cores busy meanwhile" in capsys.readouterr().out) == is_said


def test_what_cannot_be_planned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert "no causal language model could be made of" in capsys.readouterr().err
    folder = folder_of(make_model("Llama").config, tmp_path)
    assert main(["plan", folder, "--memory", "much"]) == 2
    assert "--memory must be a positive size" in capsys.readouterr().err
    assert main(["plan", folder, "--device", "nothing"]) == 2
    assert "--device nothing cannot be used" in capsys.readouterr().err
    with pytest.raises(OptionError, match="needs at least 1"):
        forecast(outline(folder), EngineConfig(kv_budget=10), LOAD, CPU)
    jetmoe = sweep.build_tiny("jetmoe", "JetMoeForCausalLM", seed=0)
    with pytest.raises(UnsupportedModelError, match="cannot be run on shapes alone"):  # its router asks for values
        forecast(outline(folder_of(jetmoe.config, tmp_path)), EngineConfig(), LOAD, CPU)
