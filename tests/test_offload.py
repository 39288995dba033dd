"""Models whose weights accelerate keeps elsewhere, and loads for each use: the answers are those of a plain copy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_recurrent import make_hybrid
from test_rope import CASES, alone
from tiny_models import SHAPE, generate_alone, greedy, make_model, make_prompts

import hf_cb
from hf_cb import EngineConfig, UnsupportedModelError

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.usefixtures("patched")
PROMPTS = make_prompts([3, 12, 30])
REST = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
MAPS = {
    "layers": REST | {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)},
    "embeddings": REST
    | {f"model.layers.{i}": "cpu" for i in range(4)}
    | {"model.embed_tokens": "disk", "lm_head": "disk"},
    "all": {"": "disk"},
}


def offload(how: str, model: Any, folder: Path) -> Any:
    if how == "cpu_offload":
        return accelerate.cpu_offload(model)
    if how == "disk_offload":
        return accelerate.disk_offload(model, folder / "weights")
    if how == "dispatch_model":
        return accelerate.dispatch_model(model, MAPS["layers"], main_device="cpu", offload_dir=folder / "weights")
    model.save_pretrained(folder / "model")
    return type(model).from_pretrained(folder / "model", device_map=MAPS[how], offload_folder=folder / "weights").eval()


def seen(model: Any) -> list[tuple]:
    """What accelerate has put on each module, and where the weights are."""
    hooks = [(id(m.__dict__.get("_hf_hook")), id(m.__dict__.get("forward"))) for m in model.modules()]
    return [*hooks, *((name, t.device) for name, t in model.state_dict().items())]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", [*MAPS, "cpu_offload", "disk_offload", "dispatch_model"])
def test_answers(how: str, tied: bool, tmp_path: Path) -> None:
    plain = make_model("Llama", tie_word_embeddings=tied)
    want = [generate_alone(plain, p, greedy()) for p in PROMPTS]
    model = offload(how, plain, tmp_path)
    before = seen(model)
    config = EngineConfig(block_size=4, max_batch_tokens=16)
    assert [r.generated_tokens for r in model.generate_batch(PROMPTS, greedy(), config).values()] == want
    assert hf_cb.explain(model).path == "paged"
    hf_cb.restore(model)
    assert seen(model) == before
    assert [generate_alone(model, p, greedy()) for p in PROMPTS] == want


def test_options_that_make_tensors_of_their_own() -> None:
    options = greedy(8, min_new_tokens=6, eos_token_id=[5, 6], bad_words_ids=[[7]], repetition_penalty=1.3)
    want = [generate_alone(make_model("Llama"), p, options) for p in PROMPTS]
    model = accelerate.cpu_offload(make_model("Llama"))
    assert [r.generated_tokens for r in model.generate_batch(PROMPTS, options).values()] == want


def test_two_managers_take_turns() -> None:
    """accelerate loads a layer's weights for each use and drops them after it: two forwards at once would collide."""
    plain = make_model("Llama")
    want = [generate_alone(plain, p, greedy(20)) for p in PROMPTS]
    model = accelerate.cpu_offload(plain)
    config = EngineConfig(block_size=4, max_batch_tokens=8)

    def batch(_: int) -> list[list[int]]:
        return [r.generated_tokens for r in model.generate_batch(PROMPTS, greedy(20), config).values()]

    hf_cb.explain(model)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(batch, range(8))) == [want] * 8


def test_dense_path() -> None:
    torch.manual_seed(0)
    plain = transformers.BloomForCausalLM(transformers.BloomConfig(**SHAPE, n_layer=2, n_head=4)).eval()
    want = [generate_alone(plain, p, greedy(6)) for p in PROMPTS]
    model = accelerate.cpu_offload(plain)
    assert [r.generated_tokens for r in model.generate_batch(PROMPTS, greedy(6)).values()] == want
    assert hf_cb.explain(model).path == "dense"


@pytest.mark.parametrize("name", ["Bamba", "FalconH1", "Qwen3Next", "Mamba"])
def test_recurrent_layers(name: str) -> None:
    plain = make_hybrid(name)
    want = [generate_alone(plain, p, greedy(6)) for p in PROMPTS]
    model = accelerate.cpu_offload(plain)
    before = seen(model)
    config = EngineConfig(block_size=4, max_batch_tokens=8)
    assert [r.generated_tokens for r in model.generate_batch(PROMPTS, greedy(6), config).values()] == want
    assert hf_cb.explain(model).path == "paged" and seen(model) == before


@pytest.mark.parametrize("case", ["dynamic", "longrope, keys computed again"])
def test_rotary_scaling_by_length(case: str) -> None:
    family, changes = CASES[case]
    plain = make_model(family, **changes)
    prompts = make_prompts([5, 31, 45])
    want = alone(plain, prompts, 6)
    model = accelerate.dispatch_model(plain, {"": "cpu"}, main_device="cpu", force_hooks=True)
    accelerate.hooks.add_hook_to_module(model.model.rotary_emb, accelerate.hooks.AlignDevicesHook("cpu"))
    assert [r.generated_tokens for r in model.generate_batch(prompts, greedy(6)).values()] == want
    assert hf_cb.explain(model).path == "paged"


def test_equal_beginnings_are_shared() -> None:
    """Weights that come and go between steps are the same weights."""
    model = accelerate.cpu_offload(make_model("Llama"))
    config = EngineConfig(block_size=4)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        first = manager.submit(PROMPTS[2], greedy(4)).result()
        steps = len(manager.trace())
        again = manager.submit(PROMPTS[2], greedy(4)).result()
        prefilled = sum(record.prefill_tokens for record in manager.trace()[steps:])
    assert again.generated_tokens == first.generated_tokens and prefilled <= 4


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = make_model("Llama").to("meta")
    with pytest.raises(UnsupportedModelError, match="no weights"):
        model.generate_batch(PROMPTS, greedy())
