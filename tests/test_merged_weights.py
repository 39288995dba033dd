"""Weights merged for fused steps: the same Parameter objects with the same values, for whoever looks."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import DEVICE, PROMPTS, Harness, alone, assert_same, bits, is_merged, make, storage_bytes
from tiny_models import generate_alone, greedy
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_cb
from hf_cb.models.fused import gpu_stack
from hf_cb.modules.merged import Product, merge

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.usefixtures("intercepted")


def test_accelerate_explain_and_restore() -> None:
    model = make(attention_bias=True, tie_word_embeddings=True)
    before, size = bits(model), storage_bytes(model)
    objects = {name: (id(p), p.shape, p.dtype, p.stride()) for name, p in model.named_parameters()}
    keys = [set(vars(m)) for m in model.modules()]
    hf_cb.accelerate(model, attention="triton", block_size=4)
    assert "fused Triton kernels, on merged weights" in hf_cb.explain(model).modules
    places = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(places) == len(list(model.parameters())), "explaining leaves them as they were"
    assert [r.generated_tokens for r in model.generate_batch(PROMPTS, greedy(3)).values()] == alone(model, 3)
    q, k, v = (getattr(model.model.layers[0].self_attn, f"{name}_proj") for name in "qkv")
    for name in ("weight", "bias"):
        assert len({getattr(m, name).untyped_storage().data_ptr() for m in (q, k, v)}) == 1
    assert {name: (id(p), p.shape, p.dtype, p.stride()) for name, p in model.named_parameters()} == objects
    assert storage_bytes(model) == size and all(type(p) is nn.Parameter for p in model.parameters())
    assert_same(model.state_dict(), before)
    hf_cb.restore(model)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(places)
    assert [set(vars(m)) for m in model.modules()] == keys and not gpu_stack._fused.get(model)
    assert storage_bytes(model) == size
    assert_same(model.state_dict(), before)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    size = file.tell()
    file.seek(0)
    return torch.load(file, weights_only=False), size


def test_saving_and_copying(tmp_path: Any) -> None:
    model = make(num_hidden_layers=2, attention_bias=True)
    before, size = bits(model), saved(model.state_dict())[1]
    model.save_pretrained(tmp_path / "before")
    Harness(model)
    assert is_merged(model)
    model.save_pretrained(tmp_path / "merged")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "merged")]
    assert files[0] == files[1]
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").to(DEVICE).state_dict(), before)
    loaded, merged_size = saved(model.state_dict())
    assert_same(loaded, before)
    assert merged_size < size * 1.02
    copied = copy.deepcopy(model)
    assert_same(copied.state_dict(), before)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in copied.parameters())
    copied_state = copy.deepcopy(model.state_dict())
    assert_same(copied_state, before)
    assert sum(
        {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in copied_state.values()}.values()
    ) == sum(v.nbytes for v in before.values())
    assert_same(pickle.loads(pickle.dumps(model)).state_dict(), before)
    again, _ = saved(model)
    assert_same(again.state_dict(), before)
    assert Harness(again).tokens(2) == alone(model, 2) and is_merged(again), "its views are taken as they are"
    assert is_merged(model)
    other = {name: value + 1 for name, value in before.items()}
    model.load_state_dict(other)
    assert_same(model.state_dict(), other)
    assert is_merged(model)


@pytest.mark.parametrize("how", ["dtype", "copies"])
def test_weights_that_go_elsewhere(how: str) -> None:
    model = make()
    before, size = bits(model), storage_bytes(model)
    harness = Harness(model)
    if how == "dtype":
        model.double().float()
    else:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    assert not is_merged(model) and storage_bytes(model) == size
    assert_same(model.state_dict(), before)
    assert harness.tokens(2) == alone(model, 2) and is_merged(model)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_in_between(optimizer: Any) -> None:
    model, plain = make(num_hidden_layers=2), make(num_hidden_layers=2)
    harness = Harness(model)
    both = [(each, optimizer(each.parameters(), lr=0.05)) for each in (model, plain)]
    ids = torch.tensor([PROMPTS[1]], device=DEVICE)
    for _ in range(2):
        assert harness.tokens(3) == alone(plain, 3)
        for each, steps in both:
            each.train()
            each(ids, labels=ids).loss.backward()
            steps.step()
            steps.zero_grad()
            each.eval()
        assert_same(model.state_dict(), plain.state_dict())
        assert is_merged(model), "written in place"
    key = harness.runner.weights_key()
    assert harness.tokens(3) == alone(plain, 3) and harness.runner.weights_key() == key
    assert generate_alone(model, PROMPTS[1], greedy(3)) == alone(plain, 3)[1]


def test_two_managers_and_restore() -> None:
    model = make()
    first, second = Harness(model), Harness(model)
    want = alone(model, 2)
    assert first.runner._fused is second.runner._fused
    assert [first.tokens(2), second.tokens(2), first.tokens(2)] == [want] * 3
    hf_cb.restore(model)
    assert first.tokens(2) == want, "with the model's own modules"
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_models_that_share_a_parameter() -> None:
    first, second = make(), make()
    second.model.layers[0].mlp.up_proj.weight = first.model.layers[0].mlp.up_proj.weight
    want = alone(first, 2), alone(second, 2)
    harnesses = Harness(first), Harness(second)
    for _ in range(2):
        assert tuple(h.tokens(2) for h in harnesses) == want
    with torch.no_grad():
        second.model.layers[0].mlp.up_proj.weight *= -1
    assert tuple(h.tokens(2) for h in harnesses) == (alone(first, 2), alone(second, 2))


def test_a_model_is_collected() -> None:
    gc.collect()
    before = len(gpu_stack._fused)
    model = make()
    Harness(model).tokens(1)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and len(gpu_stack._fused) == before


# ------------------------------------------------------------------------------------------------------------- products


def linears(*sizes: int, bias: bool = True) -> nn.Module:
    return nn.ModuleList([nn.Linear(8, size, bias=bias) for size in sizes])


def shares_a_module(model: Any) -> list[Product]:
    return [Product([model[0], model[1]]), Product([model[1], model[2]])]


def tied_by_data(model: Any) -> list[Product]:
    model[2] = nn.Linear(8, 5)
    model[2].weight.data = model[1].weight.data
    return [Product([model[0], model[1]])]


def inside_of_something(model: Any) -> list[Product]:
    model[1].weight.data = torch.randn(9, 8)[2:7]
    return [Product([model[0], model[1]])]


def one_bias(model: Any) -> list[Product]:
    model[1].bias = None
    return [Product([model[0], model[1]])]


def transposed(model: Any) -> list[Product]:
    model[1].weight.data = torch.randn(8, 5).t()
    return [Product([model[0], model[1]])]


@pytest.mark.parametrize("case", [shares_a_module, tied_by_data, inside_of_something, one_bias, transposed])
@torch.no_grad()
def test_what_is_not_merged_is_right_all_the_same(case: Callable[[Any], list[Product]]) -> None:
    model = linears(3, 5, 5)
    products, x = case(model), torch.randn(4, 8)
    places = [p.data_ptr() for p in model.parameters()]
    merge(products, model)
    assert [p.data_ptr() for p in model.parameters()] == places
    for product in products:
        assert product.is_current()
        assert torch.equal(product(x), torch.cat([module(x) for module in product.modules], -1))


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_one_product(bias: bool) -> None:
    model, x = linears(3, 5, 4, bias=bias), torch.randn(4, 8)
    product = Product(list(model))
    want: list[Tensor] = [module(x) for module in model]
    merge([product], model)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1 + bias
    torch.testing.assert_close(product(x), torch.cat(want, -1))
    model[1].weight.mul_(2)
    torch.testing.assert_close(product(x), torch.cat([module(x) for module in model], -1))
    model[1].weight = nn.Parameter(torch.randn(5, 8))
    assert not product.is_current()
    merge([product], model)
    torch.testing.assert_close(product(x), torch.cat([module(x) for module in model], -1))
    product.part()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    torch.testing.assert_close(product(x), torch.cat([module(x) for module in model], -1))
