"""What packing must survive: other defaults, modes, transforms, interrupts, no memory, shared weights."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from packed_models import PROMPTS, alone, failing_at, tokens
from tiny_models import greedy, make_model
from torch import nn

import hf_cb
from hf_cb.kernels.cpu import library as lib
from hf_cb.models.fused import known as knowing
from hf_cb.modules import weights as packing
from hf_cb.modules.weights import is_packed

pytestmark = pytest.mark.skipif(lib.library() is None, reason=f"no compiled kernels: {lib.problem()}")


def test_other_default_dtypes_and_devices() -> None:
    """Both are global to the process: another thread's `from_pretrained` may have set them."""
    model = make_model("Llama")
    want = alone(model)
    hf_cb.accelerate(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tokens(model) == want
        assert all(len(r.generated_tokens) == 8 for r in model.generate_batch(PROMPTS, max_new_tokens=8).values())
    finally:
        torch.set_default_dtype(torch.float32)
    hf_cb.restore(model)


def test_a_packed_layer_refuses_what_torch_refuses() -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model)
    tokens(model)
    for shape in ((1, 128), (4, 32), (1, 3)):
        with torch.no_grad(), pytest.raises(RuntimeError):
            model.lm_head(torch.zeros(shape))
    tokens(model)
    with torch.no_grad(), pytest.raises(IndexError):
        model.model.embed_tokens(torch.tensor([[500]]))
    hf_cb.restore(model)


class Wrapped(nn.Parameter):
    """A weight of another class, as quantisers make them."""


def test_weights_of_other_classes_are_left_alone() -> None:
    model = make_model("Llama")
    linear = model.model.layers[1].mlp.up_proj
    linear.weight.__class__ = Wrapped
    want = alone(model)
    hf_cb.accelerate(model)
    assert tokens(model) == want
    assert type(linear.weight) is Wrapped
    hf_cb.restore(model)
    assert type(linear.weight) is Wrapped


def test_a_tied_embedding_that_is_replaced() -> None:
    model = make_model("Llama", tie_word_embeddings=True)
    hf_cb.accelerate(model)
    tokens(model)
    model.model.embed_tokens.weight = nn.Parameter(torch.randn(128, 64))
    want = alone(model)
    assert tokens(model) == want
    hf_cb.restore(model)


def test_rotary_frequencies_that_are_changed() -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model)
    tokens(model)
    model.model.rotary_emb.inv_freq.mul_(0.5)
    want = alone(model)
    assert tokens(model) == want
    hf_cb.restore(model)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_accelerated_model_is_collected(persistent: bool) -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model)
    model.generate_batch(PROMPTS, greedy(2), persistent_manager=persistent)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_packing_again_without_a_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_cb.models.fused.stack.PACK_AGAIN_S", 0.0)
    model = make_model("Llama")
    hf_cb.accelerate(model, prefix_caching=False)
    with model.continuous_batching_context_manager() as manager:
        manager.submit(PROMPTS[0], greedy(2)).result()
        model.state_dict()
        assert not is_packed(model.lm_head.weight)
        manager.submit(PROMPTS[0], greedy(2)).result()
        assert is_packed(model.lm_head.weight)
    hf_cb.restore(model)


def test_two_managers_on_one_model() -> None:
    model = make_model("Llama")
    want = alone(model)
    hf_cb.accelerate(model)
    first, second = (hf_cb.ContinuousBatchingManager(model, config=hf_cb.EngineConfig()) for _ in range(2))
    for manager in (first, second):
        manager.start()
    for _ in range(3):
        for manager in (first, second):
            handles = [manager.submit(p, greedy(8)) for p in PROMPTS]
            assert [h.result().generated_tokens for h in handles] == want
        model.state_dict()
    for manager in (first, second):
        manager.stop(block=True)
    hf_cb.restore(model)


def test_a_small_cache_does_not_hide_the_layers() -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model, block_size=4, num_blocks=12)
    tokens(model)
    assert is_packed(model.lm_head.weight)
    assert "native call" in str(hf_cb.explain(model))
    assert is_packed(model.lm_head.weight)  # explaining leaves them as they were
    hf_cb.restore(model)


def test_no_memory_for_packing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("Llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    want = alone(model)
    take = failing_at(9, MemoryError("none left"), packing.PackedWeights.take)
    monkeypatch.setattr(packing.PackedWeights, "take", take)
    hf_cb.accelerate(model)
    with caplog.at_level(logging.WARNING, "hf_cb"):
        assert tokens(model) == want
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    hf_cb.restore(model)


def test_no_memory_for_unpacking_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hf_cb.accelerate(model)
    tokens(model)
    restore = failing_at(5, MemoryError("none left"), packing.PackedWeights._restore)
    monkeypatch.setattr(packing.PackedWeights, "_restore", restore)
    with pytest.raises(MemoryError):
        model.state_dict()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    hf_cb.restore(model)


def test_models_that_share_weights() -> None:
    first = make_model("Llama")
    second = make_model("Llama")
    second.model.layers[0].mlp.up_proj.weight = first.model.layers[0].mlp.up_proj.weight
    want = [alone(first), alone(second)]
    for model in (first, second):
        hf_cb.accelerate(model)
    for _ in range(2):
        assert [tokens(first), tokens(second)] == want
    for model in (first, second):
        hf_cb.restore(model)
    assert not knowing._known


def test_inference_tensors() -> None:
    with torch.inference_mode():
        model = make_model("Llama")
    want = alone(model)
    hf_cb.accelerate(model)
    assert tokens(model) == want
    model.state_dict()
    hf_cb.restore(model)


def test_an_interrupt_in_the_middle_of_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hf_cb.accelerate(model)
    tokens(model)
    monkeypatch.setattr(torch, "empty", failing_at(3, KeyboardInterrupt(), torch.empty))
    with pytest.raises(KeyboardInterrupt):
        model.state_dict()
    monkeypatch.undo()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    hf_cb.restore(model)


def test_modes_and_transforms() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd import forward_ad

    model = make_model("Llama")
    x = torch.randn(3, 64)
    want = model.lm_head(x).detach()
    hf_cb.accelerate(model)
    tokens(model)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model.lm_head.weight.sum()
    tokens(model)
    with torch.no_grad(), forward_ad.dual_level():
        assert forward_ad.unpack_dual(model.lm_head(forward_ad.make_dual(x, torch.ones(3, 64)))).tangent is not None
    tokens(model)
    with torch.no_grad():
        assert torch.allclose(torch.vmap(model.lm_head)(x[None]), want[None], atol=1e-4)
    hf_cb.restore(model)


@pytest.mark.parametrize("how", ["a new session", "reset_prefix_cache"])
def test_writes_that_leave_no_trace(how: str) -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model)
    with model.continuous_batching_context_manager() as manager:
        manager.submit(PROMPTS[0], greedy(2)).result()
        model.model.norm.weight.data.mul_(torch.linspace(0.1, 3, 64))
        if how == "reset_prefix_cache":
            manager.reset_prefix_cache()
            got = manager.submit(PROMPTS[0], greedy(8)).result().generated_tokens
    if how == "a new session":
        got = tokens(model)[0]
    assert got == alone(model)[0]
    hf_cb.restore(model)


def test_a_class_whose_forward_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model)
    tokens(model)
    mlp = type(model.model.layers[0].mlp)
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: forward(self, x) * 0.5)
    want = alone(model)
    assert tokens(model) == want
    hf_cb.restore(model)


def test_a_first_use_under_autocast() -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens(model)
    assert is_packed(model.lm_head.weight)
    assert tokens(model) == alone(model)
    hf_cb.restore(model)
