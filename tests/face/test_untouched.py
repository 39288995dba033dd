"""Invariant 6: outside a step the model and transformers are as before; patch, accelerate and their undoing."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import transformers
from tiny_models import generate_alone, greedy, make_model, make_prompts
from transformers import masking_utils, modeling_utils
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

import hf_cb
from hf_cb import EngineConfig, IncompatibleTransformersError, UnsupportedModelError
from hf_cb.attention import interception

PROMPTS = make_prompts([5, 12])


def fingerprint() -> dict:
    """Everything of transformers that hf_cb may ever wrap."""
    return {
        "mixin": dict(vars(ContinuousMixin)),
        "generate": dict(vars(transformers.GenerationMixin)),
        "masks": dict(vars(masking_utils)),
        "mask interface": dict(vars(masking_utils.AttentionMaskInterface)),
        "attention interface": dict(vars(modeling_utils.AttentionInterface)),
        "causal": dict(vars(masking_utils.causal_mask_function)),
    }


def state(model) -> tuple:
    config = model.config.to_dict(), model.config._attn_implementation, model.generation_config.to_dict()
    return config, [m.training for m in model.modules()], list(vars(model)), [p.data_ptr() for p in model.parameters()]


def test_patch_and_unpatch_leave_no_trace(llama) -> None:
    before, model_before = fingerprint(), state(llama)
    hf_cb.patch()
    hf_cb.patch(block_size=8)  # idempotent: the options change, nothing is wrapped twice
    llama.generate_batch(PROMPTS, greedy())
    hf_cb.unpatch()
    hf_cb.unpatch()
    assert fingerprint() == before and state(llama) == model_before


def test_unpatched_models_keep_transformers_own_calls(llama) -> None:
    original = ContinuousMixin.generate_batch
    hf_cb.accelerate(llama)
    other = make_model("Llama", seed=1)
    assert not hasattr(llama, "nothing") and callable(other.generate_batch)
    with pytest.raises(AttributeError, match="hf_cb.patch"):
        other.stream_batch(PROMPTS)
    assert [d.index for d in llama.stream_batch(PROMPTS[:1], greedy(1))] == [0]
    hf_cb.restore(llama)
    assert ContinuousMixin.generate_batch is original and not hasattr(other, "stream_batch")


def test_accelerate_and_restore_with_several_models() -> None:
    before = fingerprint()
    a, b = make_model("Llama"), make_model("Gemma3")
    assert hf_cb.accelerate(a) is a and hf_cb.accelerate(a, block_size=4) is a
    hf_cb.accelerate(b)
    hf_cb.restore(a)
    hf_cb.restore(a)
    assert [r.generated_tokens for r in b.generate_batch(PROMPTS, greedy()).values()] == [
        generate_alone(b, p, greedy()) for p in PROMPTS
    ]
    hf_cb.restore(b)
    assert fingerprint() == before


def test_a_model_that_dies_lets_go(llama) -> None:
    before = fingerprint()
    model = make_model("Llama", seed=3)
    hf_cb.accelerate(model)
    model.generate_batch(PROMPTS, greedy(2))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and fingerprint() == before


def test_a_failing_accelerate_changes_nothing(llama) -> None:
    before = fingerprint()
    with pytest.raises(hf_cb.OptionError):
        hf_cb.accelerate(llama, unheard_of=1)
    llama.config.rope_parameters = {"rope_type": "spiral", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM.*'spiral' rotary"):
        hf_cb.accelerate(llama)
    with pytest.raises(hf_cb.OptionError, match="modules.*accelerate"):
        hf_cb.patch(modules="fused")
    assert fingerprint() == before


@pytest.mark.parametrize("name", ["and_masks", "AttentionMaskInterface"])
def test_an_unknown_transformers_fails_loudly_at_patch(monkeypatch, name: str) -> None:
    monkeypatch.delattr(masking_utils, name)
    before = dict(vars(ContinuousMixin))
    with pytest.raises(IncompatibleTransformersError, match=f"transformers {transformers.__version__}.*{name}"):
        hf_cb.patch()
    assert dict(vars(ContinuousMixin)) == before


def test_a_missing_method_is_named(monkeypatch) -> None:
    monkeypatch.delattr(transformers.GenerationMixin, "_get_logits_processor")
    with pytest.raises(IncompatibleTransformersError, match="_get_logits_processor"):
        hf_cb.patch()


def test_forward_generate_and_backward_while_a_manager_runs(llama) -> None:
    """Plain calls in other threads see causal attention and their own cache, whatever the engine does meanwhile."""
    hf_cb.patch()
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        want = llama(ids).logits
    loss = llama(ids, labels=ids).loss.item()
    answer = generate_alone(llama, PROMPTS[0], greedy())
    with llama.continuous_batching_context_manager() as manager:
        handles = [manager.submit(p, greedy(200)) for p in PROMPTS * 4]
        for _ in range(10):
            with torch.no_grad():
                torch.testing.assert_close(llama(ids).logits, want)
            assert generate_alone(llama, PROMPTS[0], greedy()) == answer
        trained = llama(ids, labels=ids).loss
        trained.backward()
        assert trained.item() == pytest.approx(loss)
        assert all(h.result().error is None for h in handles)
    assert not any(hasattr(p, "hf_cb") for p in llama.parameters())
    assert not any(b.is_inference() for b in llama.buffers())


def test_training_mode_comes_back_submodule_by_submodule(llama) -> None:
    hf_cb.patch()
    llama.train()
    llama.model.layers[0].eval()
    before = [m.training for m in llama.modules()]
    want = generate_alone(make_model("Llama"), PROMPTS[0], greedy())
    with llama.continuous_batching_context_manager() as outer:
        assert not llama.training
        assert list(llama.generate_batch(PROMPTS[:1], greedy()).values())[0].generated_tokens == want
        assert not llama.training, "the outer manager still runs"
        assert outer.submit(PROMPTS[0], greedy()).result().generated_tokens == want
    assert [m.training for m in llama.modules()] == before


def test_training_mode_comes_back_after_an_exception(llama) -> None:
    hf_cb.patch()
    llama.train()
    with pytest.raises(ZeroDivisionError), llama.continuous_batching_context_manager():
        raise ZeroDivisionError
    assert llama.training


def test_a_step_waits_for_somebody_elses_training(llama) -> None:
    hf_cb.patch()
    with llama.continuous_batching_context_manager(
        continuous_batching_config=EngineConfig(train_mode_timeout=30)
    ) as manager:
        llama.train()
        handle = manager.submit(PROMPTS[0], greedy())
        assert not handle.wait(0.3)
        llama.eval()
        assert handle.result(10).error is None


def test_a_step_gives_up_waiting_for_training(llama) -> None:
    hf_cb.patch()
    with llama.continuous_batching_context_manager(
        continuous_batching_config=EngineConfig(train_mode_timeout=0.1)
    ) as manager:
        llama.train()
        with pytest.raises(RuntimeError, match="training mode"):
            manager.submit(PROMPTS[0], greedy()).result(10)
    llama.eval()


def test_changed_weights_are_seen(llama) -> None:
    """Also by a kept manager whose prefix cache knows the prompt from before."""
    hf_cb.patch(block_size=2)
    prompts = make_prompts([30])
    llama.generate_batch(prompts, greedy(), persistent_manager=True)
    with torch.no_grad():
        for p in llama.parameters():
            p.mul_(-1.1)
    want = generate_alone(llama, prompts[0], greedy())
    (result,) = llama.generate_batch(prompts, greedy(), persistent_manager=True).values()
    assert result.generated_tokens == want and result.metrics.cached_tokens == 0
    (again,) = llama.generate_batch(prompts, greedy(), persistent_manager=True).values()
    assert again.generated_tokens == want and again.metrics.cached_tokens > 0
    llama.destroy_cached_continuous_batching_manager()


def test_weights_changed_through_data_inside_a_pause(llama) -> None:
    hf_cb.patch(block_size=2)
    prompt = make_prompts([30])[0]
    with llama.continuous_batching_context_manager() as manager:
        manager.submit(prompt, greedy()).result()
        with manager.pause():
            for p in llama.parameters():
                p.data *= -1.1
        result = manager.submit(prompt, greedy()).result()
    assert result.generated_tokens == generate_alone(llama, prompt, greedy())


def test_copies_and_pickles_are_plain_models(llama, tmp_path) -> None:
    hf_cb.accelerate(llama)
    before = {k: v.clone() for k, v in llama.state_dict().items()}
    llama.generate_batch(PROMPTS, greedy(2), persistent_manager=True)
    copied, pickled = copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))
    llama.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for other in (copied, pickled, loaded, llama):
        for name, value in other.state_dict().items():
            assert torch.equal(value, before[name])
    with pytest.raises(AttributeError, match="hf_cb"):
        copied.stream_batch(PROMPTS)
    hf_cb.restore(llama)


def test_interception_is_inert_in_other_threads(shared_llama) -> None:
    interception.install(__name__)
    seen = []

    class Step:
        def attend(self, *args):
            raise AssertionError("another thread's forward reached this step")

    def plain() -> None:
        with torch.no_grad():
            seen.append(shared_llama(torch.tensor([PROMPTS[0]])).logits.shape)

    try:
        with interception.stepping(Step()):
            thread = threading.Thread(target=plain)
            thread.start()
            thread.join()
    finally:
        interception.uninstall(__name__)
    assert len(seen) == 1
