"""The manager behind `generate`: shared by threads, sized by calls, kept with the model, and gone without a trace."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from types import MethodType
from typing import Any

import pytest
import torch
from routed import PROMPTS, padded, same
from tiny_models import greedy, make_model
from transformers import GenerationMixin

import hf_cb
from hf_cb.manager import kept
from hf_cb.manager.generating.keeping import LEAST

GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=8, eos_token_id=None)


@pytest.fixture
def model() -> Any:
    model = hf_cb.accelerate(make_model(), modules="off")
    yield model
    hf_cb.restore(model)


def manager_of(model: Any) -> Any:
    return kept.kept_manager(model, kept.GENERATE)


def threads_of_ours() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "hf_cb"]


def test_threads_share_batches(model, shared_llama, ways) -> None:
    """While a criterion keeps one call's row waiting, another call runs on the same manager from begin to end."""
    started, go_on = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def wait(ids: Any, scores: Any) -> Any:
        started.set()
        assert go_on.wait(60)
        return torch.zeros(len(ids), dtype=torch.bool)

    def patient() -> None:
        found["patient"] = model.generate(
            **padded(PROMPTS[:2]), **GREEDY | dict(max_new_tokens=100), stopping_criteria=[wait]
        )

    thread = threading.Thread(target=patient)
    thread.start()
    assert started.wait(60)
    before = manager_of(model)
    got = model.generate(**padded(), **GREEDY)
    assert manager_of(model) is before and before.is_running(), "the first call is still there"
    go_on.set()
    thread.join(60)
    assert same(got, shared_llama.generate(**padded(), **GREEDY))
    assert same(found["patient"], shared_llama.generate(**padded(PROMPTS[:2]), **GREEDY | dict(max_new_tokens=100)))
    assert ways.take() == [] and not threads_of_ours()


def test_many_threads(model, shared_llama, ways) -> None:
    want = [shared_llama.generate(torch.tensor([p]), **GREEDY) for p in PROMPTS]
    found: dict[int, Any] = {}

    def generate(i: int) -> None:
        found[i] = [model.generate(torch.tensor([PROMPTS[i % 4]]), **GREEDY) for _ in range(3)]

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(same(out, want[i % 4]) for i in range(8) for out in found[i])
    manager = manager_of(model)
    manager.engine.check_idle()
    assert ways.take() == [] and not threads_of_ours()


def test_room_grows_with_the_calls(model, shared_llama, ways) -> None:
    model.generate(**padded(), **GREEDY)
    small = weakref.ref(manager_of(model))
    model.generate(**padded(), **GREEDY)
    assert manager_of(model) is small()
    many = torch.tensor([PROMPTS[0]]).repeat(LEAST.seqs + 3, 1)
    assert same(model.generate(many, **GREEDY), shared_llama.generate(many, **GREEDY))
    gc.collect()
    assert small() is None, "its memory is free again"
    large = manager_of(model)
    model.generate(**padded(), **GREEDY)
    assert manager_of(model) is large and ways.take() == []


def test_the_model_looks_as_before_between_calls(ways) -> None:
    model = make_model().train()
    names, loop = list(vars(model)), vars(GenerationMixin)["_sample"]
    hf_cb.accelerate(model)
    model.generate(**padded(), **GREEDY)
    assert model.training and not threads_of_ours() and ways.take() == []
    assert vars(GenerationMixin)["_sample"] is not loop
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert manager_of(other) is None
        assert torch.equal(other.generate(**padded(), **GREEDY), model.generate(**padded(), **GREEDY))
        assert manager_of(other) is None, "a copy is a plain model"
    assert set(model.state_dict()) == set(make_model().state_dict())
    hf_cb.restore(model)
    assert list(vars(model)) == names and vars(GenerationMixin)["_sample"] is loop


def test_patch_alone_leaves_generate_alone(ways) -> None:
    loop = vars(GenerationMixin)["_sample"]
    model = make_model()
    hf_cb.patch()
    model.generate(**padded(), **GREEDY)
    assert vars(GenerationMixin)["_sample"] is loop and manager_of(model) is None and ways.take() == []


def test_a_model_that_has_generated_goes() -> None:
    model = hf_cb.accelerate(make_model())
    loop = vars(GenerationMixin)["_sample"]
    model.generate(**padded(), **GREEDY)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and vars(GenerationMixin)["_sample"] is not loop


def test_the_cache_can_be_freed(model) -> None:
    model.generate(**padded(), **GREEDY)
    manager = weakref.ref(manager_of(model))
    model.destroy_cached_continuous_batching_manager()
    gc.collect()
    assert manager() is None
    assert model.generate(**padded(), **GREEDY).shape == (4, 20)


def test_beside_other_calls(model, shared_llama, ways) -> None:
    """A session of the user's own, with other options, knows nothing of it."""
    want = shared_llama.generate(**padded(), **GREEDY)
    assert same(model.generate(**padded(), **GREEDY), want)
    config = hf_cb.EngineConfig(block_size=4)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        handle = manager.submit(PROMPTS[1], greedy(60))
        assert same(model.generate(**padded(), **GREEDY), want)
        with manager.pause():
            assert same(model.generate(**padded(), **GREEDY), want)
        assert handle.result(20).error is None
    results = model.generate_batch(PROMPTS, greedy(8), config, persistent_manager=True)
    assert [r.generated_tokens for r in results.values()] == want[:, 12:].tolist()
    assert same(model.generate(**padded(), **GREEDY), want) and ways.take() == []


def test_an_interrupt_leaves_nothing_behind(model, shared_llama, ways) -> None:
    def interrupt(ids: Any, scores: Any) -> Any:
        if ids.shape[1] == 15:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        model.generate(**padded(), **GREEDY | dict(max_new_tokens=100), stopping_criteria=[interrupt])
    assert not threads_of_ours()
    manager_of(model).engine.check_idle()
    assert same(model.generate(**padded(), **GREEDY), shared_llama.generate(**padded(), **GREEDY))
    assert ways.take() == []


@pytest.mark.parametrize("modules", ["off", "fused"])
def test_training_between_calls(modules: str, ways) -> None:
    """A loop as trainers write it: generate, a step, generate, with no key of older weights."""
    models = make_model(), hf_cb.accelerate(make_model(), modules=modules)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    answers = []
    for step in range(3):
        outs = []
        for model, optimizer in zip(models, optimizers, strict=True):
            model.train()
            out = model.generate(**padded(), **GREEDY)
            assert model.training
            model.gradient_checkpointing_enable()
            loss = model(out, labels=out).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.gradient_checkpointing_disable()  # as trainers do: some versions' generate forgets its cache with it
            outs.append(out)
        assert same(outs[1], outs[0]), step
        answers.append(outs[0])
    assert not same(answers[0], answers[1]) and ways.take() == []
    hf_cb.restore(models[1])


@pytest.mark.parametrize("modules", ["off", "fused"])
def test_writes_that_leave_no_trace(modules: str, ways) -> None:
    """Through `.data`, as merging adapters and averaging weights do."""
    plain, ours = make_model(), hf_cb.accelerate(make_model(), modules=modules)
    prompt = torch.tensor([PROMPTS[1] * 6])
    for factor in (1.0, -1.1, 0.7):
        for model in (plain, ours):
            for parameter in model.parameters():
                parameter.data.mul_(factor)
        assert same(ours.generate(prompt, **GREEDY), plain.generate(prompt, **GREEDY))
    assert ways.take() == []
    hf_cb.restore(ours)


def mixed(model: Any) -> Any:
    """As accelerate prepares a model for training in mixed precision."""
    model.forward = MethodType(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward.__func__), model)
    return model


def test_mixed_precision(ways) -> None:
    """Values come to attention in another dtype than keys; a manager from before notices that it is the wrong one."""
    ours = hf_cb.accelerate(make_model())
    ours.generate(**padded(), **GREEDY)
    plain, ours = mixed(make_model()), mixed(ours)
    want = plain.generate(**padded(), **GREEDY)
    assert same(ours.generate(**padded(), **GREEDY), want)
    assert "computes in torch.bfloat16 on cpu now" in ways.take()[0]
    got = ours.generate(**padded(), **GREEDY)
    assert ways.take() == [] and hf_cb.explain(ours).path == "paged"
    agreed = (got == want)[:, 12:].float().mean()
    assert agreed > 0.8, "in bfloat16 near-ties may fall the other way"
    hf_cb.restore(ours)


def test_a_model_that_was_moved_or_given_more_tokens(model, ways) -> None:
    model.generate(**padded(), **GREEDY)
    plain = make_model()
    for change in (
        lambda m: m.double(),
        lambda m: m.float(),
        lambda m: torch.manual_seed(0) and m.resize_token_embeddings(140, mean_resizing=False),
    ):
        for each in (plain, model):
            change(each)
        vocab = plain.get_input_embeddings().weight.shape[0]
        ids = torch.tensor([[5, vocab - 1, 7]])
        assert same(model.generate(ids, **GREEDY), plain.generate(ids, **GREEDY))
    assert ways.take() == [], "nothing is tried and left"


@pytest.mark.parametrize("what", ["the model inside", "the wrapper"])
def test_adapters(ways, what: str) -> None:
    """A PEFT model around an accelerated one, or accelerated itself."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain, ours = make_model(), make_model()
    first = plain.generate(**padded(), **GREEDY)
    wrapped = []
    for model in (plain, ours):
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0)
        wrapped.append(peft.get_peft_model(model, lora).eval())
    accelerated = ours if what == "the model inside" else wrapped[1]
    assert hf_cb.accelerate(accelerated) is accelerated
    want, got = (model.generate(**padded(), **GREEDY) for model in wrapped)
    assert same(got, want) and not same(want, first)
    with wrapped[1].disable_adapter():
        assert same(wrapped[1].generate(**padded(), **GREEDY), first)
    assert same(wrapped[1].generate(**padded(), **GREEDY), want)
    assert ways.take() == []
    manager_of(ours).engine.check_idle()  # so there is one
    one = list(wrapped[1].generate_batch(PROMPTS[:1], max_new_tokens=3, do_sample=False).values())
    assert isinstance(one[0], hf_cb.GenerationOutput)
    hf_cb.restore(accelerated)
    assert same(wrapped[1].generate(**padded(), **GREEDY), want) and manager_of(ours) is None


def test_learned_prompts_are_refused() -> None:
    """Whose vectors the model inside knows nothing of."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(hf_cb.UnsupportedModelError, match="learned vectors"):
        hf_cb.accelerate(peft.get_peft_model(make_model(), config))
