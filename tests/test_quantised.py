"""Quantised models: their answers, and weights that are wrappers around other tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import generate_alone, greedy, make_model, make_prompts
from torch import Tensor, nn

import hf_cb
from hf_cb import EngineConfig, UnsupportedModelError
from hf_cb.manager import probe

pytestmark = pytest.mark.usefixtures("patched")
PROMPTS = make_prompts([3, 12, 30])
SIZES = dict(hidden_size=128, intermediate_size=256)  # 4-bit kernels want multiples of 64


class Scaled(Tensor):
    """A weight as quantised ones are: a wrapper without memory of its own around an int8 tensor and its scale."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_, self.scale_ = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale_"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale_)  # no clone(), so it cannot be deep-copied, as quanto's cannot
        plain = [a.data_.to(a.scale_.dtype) * a.scale_ if isinstance(a, cls) else a for a in args]
        return function(*plain, **(kwargs or {}))


def scaled(weight: Tensor) -> nn.Parameter:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return nn.Parameter(Scaled((weight / scale).round().to(torch.int8), scale), requires_grad=False)


def wrap_weights(model: Any) -> Any:
    for layer in model.model.layers:
        for linear in (layer.self_attn.v_proj, layer.mlp.down_proj):
            linear.weight = scaled(linear.weight.detach())
    return model


def write_inside(linear: nn.Linear, weight: Tensor) -> None:
    new = scaled(weight)
    linear.weight.data_.copy_(new.data_)
    linear.weight.scale_.copy_(new.scale_)


def put_another(linear: nn.Linear, weight: Tensor) -> None:
    linear.weight = scaled(weight)


@pytest.mark.parametrize("change", [write_inside, put_another])
def test_a_changed_wrapper_is_noticed(change: Callable[[nn.Linear, Tensor], None]) -> None:
    """Nothing that was computed with the old weight is used again."""
    model = wrap_weights(make_model("Llama"))
    with model.continuous_batching_context_manager(continuous_batching_config=EngineConfig(block_size=4)) as manager:
        manager.submit(PROMPTS[2], greedy(2)).result()
        change(model.model.layers[0].self_attn.v_proj, torch.randn(32, 64))
        got = manager.submit(PROMPTS[2], greedy()).result().generated_tokens
    assert got == generate_alone(model, PROMPTS[2], greedy())


@pytest.mark.parametrize("what", ["wrapper", "lock"])
def test_a_small_model_that_cannot_be_copied(what: str) -> None:
    model = make_model("Llama")
    if what == "wrapper":
        wrap_weights(model)
    else:
        model.lock = threading.Lock()
    assert [r.generated_tokens for r in model.generate_batch(PROMPTS, greedy()).values()] == [
        generate_alone(model, p, greedy()) for p in PROMPTS
    ]
    assert hf_cb.explain(model).path == "paged"


def test_a_model_that_computes_nan_is_refused_as_such() -> None:
    model = make_model("Llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(UnsupportedModelError, match="NaN in float32"):
        model.generate_batch(PROMPTS, greedy())


def load(method: str, dtype: torch.dtype, folder: Path) -> Any:
    """A tiny model quantised by a package, or a skip."""
    if method.startswith("torchao"):
        quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        kinds = {"weights": "Int8WeightOnlyConfig", "activations": "Int8DynamicActivationInt8WeightConfig"}
        kind = getattr(quantization, kinds[method.split()[1]])
        config = transformers.TorchAoConfig(kind())
    elif method.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        four = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        config = transformers.BitsAndBytesConfig(**(four if "4" in method else dict(load_in_8bit=True)))
    else:
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
        config = transformers.QuantoConfig(weights="int8")
    make_model("Llama", **SIZES).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config).eval()


METHODS = ["torchao weights", "torchao activations", "bitsandbytes 8", "bitsandbytes 4", "quanto"]


@pytest.mark.parametrize("method", METHODS)
def test_float32_answers(method: str, tmp_path: Path) -> None:
    """Token for token: where activations are quantised too, by the dense path."""
    model = load(method, torch.float32, tmp_path)
    want = [generate_alone(model, p, greedy()) for p in PROMPTS]
    assert [r.generated_tokens for r in model.generate_batch(PROMPTS, greedy()).values()] == want
    if method in ("torchao weights", "quanto"):
        assert hf_cb.explain(model).path == "paged"


@pytest.mark.parametrize("method", ["torchao activations", "bitsandbytes 8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_quantised_activations_in_half_precision_are_batched(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(method, dtype, tmp_path)
    assert hf_cb.explain(model).path == "paged"
    results = list(model.generate_batch(PROMPTS, greedy(8)).values())
    with torch.no_grad():
        for prompt, result in zip(PROMPTS, results, strict=True):
            ids = torch.tensor([prompt + result.generated_tokens])
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
            taken = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            lost = (logits.amax(1) - taken) / logits.abs().amax(1)
            assert lost.max() <= probe.QUANTISED
