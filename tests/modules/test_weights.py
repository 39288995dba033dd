"""Packed weights: the same Parameter objects, and their bits, for whoever looks."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import generate_alone, greedy, make_model, make_prompts
from transformers import AutoModelForCausalLM

import hf_cb
from hf_cb.kernels.cpu import library as lib
from hf_cb.modules.weights import is_packed

pytestmark = pytest.mark.skipif(lib.library() is None, reason=f"no compiled kernels: {lib.problem()}")


@pytest.fixture(params=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> Any:
    return make_model("Llama", tie_word_embeddings=request.param == "tied", num_hidden_layers=2)


def pack(model: Any) -> dict[str, torch.Tensor]:
    """Runs a batch; what the weights were before."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hf_cb.accelerate(model)
    model.generate_batch(make_prompts([5, 3]), greedy(2))
    assert is_packed(model.lm_head.weight) and is_packed(model.model.layers[0].mlp.up_proj.weight)
    return before


def assert_same(model: Any, before: dict[str, torch.Tensor]) -> None:
    now = model.state_dict()
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], value) for name, value in before.items())


def test_the_same_objects_and_their_facts(model: Any) -> None:
    objects = {name: id(p) for name, p in model.named_parameters()}
    facts = {name: (p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()}
    before = pack(model)
    assert {name: id(p) for name, p in model.named_parameters()} == objects
    assert {n: (p.shape, p.dtype, p.device, p.requires_grad) for n, p in model.named_parameters()} == facts
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert isinstance(model.lm_head.weight, torch.nn.Parameter)
    assert is_packed(model.lm_head.weight)  # nothing above has looked at a value
    assert_same(model, before)
    assert not is_packed(model.lm_head.weight)
    hf_cb.restore(model)


# how people get at weights, and what they then have of lm_head
LOOKS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda m: m.state_dict()["lm_head.weight"],
    "data": lambda m: m.lm_head.weight.data,
    "detach": lambda m: m.lm_head.weight.detach(),
    "numpy": lambda m: torch.from_numpy(m.lm_head.weight.detach().numpy()),
    "tolist": lambda m: torch.tensor(m.lm_head.weight.tolist()),
    "clone": lambda m: m.lm_head.weight.clone(),
    "get_parameter": lambda m: m.get_parameter("lm_head.weight") + 0,
    "deepcopy": lambda m: copy.deepcopy(m).lm_head.weight,
    "deepcopy of a part": lambda m: copy.deepcopy(m.lm_head).weight,
    "pickle": lambda m: pickle.loads(pickle.dumps(m.lm_head)).weight,
    "double": lambda m: copy.deepcopy(m).double().lm_head.weight.float(),
    "to": lambda m: m.to(torch.float64).to(torch.float32).lm_head.weight,
    "save": lambda m: _saved(m)["lm_head.weight"],
    "stack": lambda m: torch.stack([m.lm_head.weight, m.lm_head.weight])[1],
    "out of a list": lambda m: torch._foreach_add([m.lm_head.weight], 0.0)[0],
    "a forward": lambda m: torch.nn.functional.linear(torch.eye(64), m.lm_head.weight).t(),
    "train": lambda m: m.train().eval().lm_head.weight + 0,
    "restore": lambda m: hf_cb.restore(m).lm_head.weight,
}


def _saved(model: Any) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("look", LOOKS, ids=str)
def test_whoever_looks_sees_the_weights(model: Any, look: str) -> None:
    before = pack(model)
    assert torch.equal(LOOKS[look](model).detach(), before["lm_head.weight"])
    assert_same(model, before)
    hf_cb.restore(model)


def test_saving_and_loading(model: Any, tmp_path: Any) -> None:
    before = pack(model)
    model.save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), before)
    pack(model)
    other = {name: value + 1 for name, value in before.items()}
    model.load_state_dict(other)
    assert_same(model, other)
    hf_cb.restore(model)


WRITES: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "in place": lambda p: p.mul_(1.5),
    "through data": lambda p: p.data.mul_(1.5),
    "new data": lambda p: setattr(p, "data", p.data * 1.5),
    "copy": lambda p: p.copy_(p * 1.5),
    "by index": lambda p: p.__setitem__(slice(None), p * 1.5),
}


@pytest.mark.parametrize("write", WRITES, ids=str)
def test_whoever_writes_is_heard(write: str) -> None:
    model = make_model("Llama", num_hidden_layers=2)
    prompts = make_prompts([9, 4])
    pack(model)
    with torch.no_grad():
        for layer in model.model.layers:
            WRITES[write](layer.mlp.up_proj.weight)
    want = [generate_alone(copy.deepcopy(model), p, greedy()) for p in prompts]
    got = [r.generated_tokens for r in model.generate_batch(prompts, greedy()).values()]
    assert got == want
    assert is_packed(model.model.layers[0].mlp.up_proj.weight)
    hf_cb.restore(model)


def test_a_norm_that_is_written_to_counts_too() -> None:
    model = make_model("Llama", num_hidden_layers=2)
    prompts = make_prompts([9, 4])
    pack(model)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(-1, 1, 64))
    want = [generate_alone(copy.deepcopy(model), p, greedy()) for p in prompts]
    assert [r.generated_tokens for r in model.generate_batch(prompts, greedy()).values()] == want
    hf_cb.restore(model)


def test_a_pause_lends_the_weights() -> None:
    model = make_model("Llama", num_hidden_layers=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prompts = make_prompts([6])
    hf_cb.accelerate(model)
    with model.continuous_batching_context_manager() as manager:
        manager.submit(prompts[0], greedy(3)).result()
        assert is_packed(model.lm_head.weight)
        with manager.pause():
            assert not is_packed(model.lm_head.weight)
            assert_same(model, before)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.tensor(prompts)).logits.square().mean().backward()
            optimizer.step()
            want = generate_alone(copy.deepcopy(model), prompts[0], greedy())
        assert manager.submit(prompts[0], greedy()).result().generated_tokens == want
        assert is_packed(model.lm_head.weight)
    hf_cb.restore(model)


def test_generate_and_training_in_between() -> None:
    model, prompts = make_model("Llama", num_hidden_layers=2), make_prompts([9, 4])
    hf_cb.accelerate(model)
    for _ in range(2):
        want = [generate_alone(copy.deepcopy(model), p, greedy()) for p in prompts]
        assert [r.generated_tokens for r in model.generate_batch(prompts, greedy()).values()] == want
        assert generate_alone(model, prompts[0], greedy()) == want[0]
        model.train()
        loss = model(torch.tensor(prompts[:1]), labels=torch.tensor(prompts[:1])).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        model.zero_grad()
        model.eval()
    hf_cb.restore(model)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_begins_from_the_weights(dora: bool) -> None:
    peft = pytest.importorskip("peft")
    model, plain = (make_model("Llama", num_hidden_layers=2) for _ in range(2))
    before = pack(model)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=dora)
    for each in (model, plain):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, each)
    want, got = plain.state_dict(), model.state_dict()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    prompts = make_prompts([9, 4])
    out = [r.generated_tokens for r in model.generate_batch(prompts, greedy()).values()]
    assert out == [generate_alone(plain, p, greedy()) for p in prompts]
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])
    hf_cb.restore(model)


def test_many_threads_look_while_others_generate() -> None:
    model, prompts = make_model("Llama", num_hidden_layers=2), make_prompts([9, 4, 12])
    q_proj = pack(model)["model.layers.1.self_attn.q_proj.weight"]
    want = [generate_alone(copy.deepcopy(model), p, greedy(20)) for p in prompts]
    wrong: list[str] = []

    def look() -> None:
        for _ in range(20):
            seen = model.model.layers[1].self_attn.q_proj.weight.detach().clone()
            # a read that began just before the weights were packed may see NaN, never anything else
            if not torch.equal(seen, q_proj) and not seen.isnan().any():
                wrong.append("weight")

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        if [r.generated_tokens for r in model.generate_batch(prompts, greedy(20)).values()] != want:
            wrong.append("tokens")
    for thread in threads:
        thread.join()
    assert not wrong
    hf_cb.restore(model)


def test_forwards_in_other_threads_are_right_meanwhile() -> None:
    """They hold off packing, or run on the packed weights."""
    model, prompts = make_model("Llama", num_hidden_layers=2), make_prompts([9, 4, 12])
    hf_cb.accelerate(model)
    want = [generate_alone(copy.deepcopy(model), p, greedy(20)) for p in prompts]
    ids = torch.tensor(prompts[:1])
    logits = model(ids).logits.detach()
    done, wrong = threading.Event(), []

    def forward(grad: bool) -> None:
        while not done.is_set():
            with torch.set_grad_enabled(grad):
                if not torch.allclose(model(ids).logits, logits, atol=1e-4):
                    wrong.append("logits")

    threads = [threading.Thread(target=forward, args=(grad,)) for grad in (False, True)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            if [r.generated_tokens for r in model.generate_batch(prompts, greedy(20)).values()] != want:
                wrong.append("tokens")
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
    hf_cb.restore(model)


def test_a_packed_model_is_collected() -> None:
    model = make_model("Llama", num_hidden_layers=2)
    pack(model)
    gone = weakref.ref(model.lm_head)
    del model
    gc.collect()
    assert gone() is None


def test_engines_that_are_gone_are_not_told() -> None:
    model = make_model("Llama", num_hidden_layers=2)
    pack(model)
    for _ in range(5):
        model.generate_batch(make_prompts([5, 3]), greedy(2))
    weights = model.lm_head.weight.__dict__["_hf_cb_packed"]
    assert len(weights._listeners) <= 2  # what is known of the model, and the last engine
    hf_cb.restore(model)


def test_restore_leaves_nothing_behind(model: Any) -> None:
    keys = [set(vars(m)) for m in model.modules()]
    before = pack(model)
    hf_cb.restore(model)
    assert [set(vars(m)) for m in model.modules()] == keys
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert_same(model, before)
