"""Recurrent layers beside attention: each request has its own state, whatever the batch, the chunks and the traffic."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from tiny_models import SHAPE, generate_alone, greedy, make_prompts

import hf_cb
from hf_cb import EngineConfig
from hf_cb.attention import interception
from hf_cb.errors import ModelChangedError
from hf_cb.models.trace import trace_layers
from hf_cb.models.twin import spread_weights

pytestmark = pytest.mark.usefixtures("patched")

_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
# short convolutions, Mamba 1 (forgets its state when it is given several tokens), Mamba 2 beside attention and in the
# same layer with it, gated delta nets, lightning attention with a cache of its own, no attention at all
HYBRIDS: dict[str, dict[str, Any]] = {
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 2},
    "Bamba": {"attn_layer_indices": [1, 3], **_MAMBA2},
    "FalconH1": {**_MAMBA2, "mamba_d_ssm": 128, "head_dim": 16},
    "Qwen3Next": {
        **{"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16, "moe_intermediate_size": 32},
        **{"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8},
    },
    "MiniMax": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4, "head_dim": 16},
    "Mamba": {"state_size": 8},
}


def make_hybrid(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE | HYBRIDS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    return spread_weights(model)


@pytest.mark.parametrize("name", HYBRIDS)
def test_answers_under_traffic(name: str) -> None:
    """Mixed steps, chunks of 5, preemption, a cancelled request, others that come later."""
    model = make_hybrid(name)
    prompts = make_prompts([1, 19, 8, 18, 5, 17])
    want = [generate_alone(model, p, greedy(14)) for p in prompts]
    config = EngineConfig(block_size=4, num_blocks=26, max_batch_tokens=8, prefill_chunk=5, max_num_seqs=4)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            handles = [manager.submit(p, greedy(14)) for p in prompts[:4]]
            cancelled = manager.submit(prompts[1], greedy(60))
        next(iter(handles[0]))
        cancelled.cancel()
        handles += [manager.submit(p, greedy(14)) for p in prompts[4:]]
        results = [h.result(timeout=60) for h in handles]
        cancelled.result(timeout=60)
    assert [r.generated_tokens for r in results] == want
    assert len(manager.engine.runner.states.lanes) == 0
    manager.engine.check_idle()


def test_a_preempted_request_starts_with_a_fresh_state() -> None:
    model = make_hybrid("Bamba")
    prompts = make_prompts([20, 19, 18, 17])
    want = [generate_alone(model, p, greedy(20)) for p in prompts]
    results = model.generate_batch(prompts, greedy(20), EngineConfig(block_size=4, num_blocks=20)).values()
    assert [r.generated_tokens for r in results] == want
    assert sum(r.metrics.preemptions for r in results) > 0


def test_a_state_is_never_found_by_prefix() -> None:
    model = make_hybrid("Lfm2")
    prompt = make_prompts([30])[0]
    want = generate_alone(model, prompt, greedy(6))
    with model.continuous_batching_context_manager(continuous_batching_config=EngineConfig(block_size=4)) as manager:
        first, second = (manager.submit(prompt, greedy(6)).result(timeout=60) for _ in range(2))
    assert first.generated_tokens == second.generated_tokens == want
    assert second.metrics.cached_tokens == 0


def test_several_sequences_have_a_state_each() -> None:
    model = make_hybrid("Lfm2")
    prompt = make_prompts([9])[0]
    options = greedy(5, do_sample=True, top_k=1, num_return_sequences=3)
    results = model.generate_batch([prompt], options)
    assert [r.generated_tokens for r in results.values()] == [generate_alone(model, prompt, greedy(5))] * 3


def test_the_model_is_as_before() -> None:
    """Classes too: their forward is wrapped while a manager runs."""
    cls = transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv
    before = cls.forward
    model = make_hybrid("Lfm2")
    prompt = make_prompts([9])[0]
    want = generate_alone(model, prompt, greedy(5))
    hf_cb.unpatch()
    hf_cb.accelerate(model)
    with model.continuous_batching_context_manager() as manager:
        handle = manager.submit(prompt, greedy(50))
        next(iter(handle))
        assert cls.forward is not before
        assert generate_alone(model, prompt, greedy(5)) == want
        handle.result(timeout=60)
    hf_cb.restore(model)
    hf_cb.patch()
    hf_cb.unpatch()
    assert cls.forward is before
    hf_cb.patch()


@pytest.mark.parametrize("std", [0.02, 0.2])
def test_weights_that_hide_a_forgotten_state(std: float) -> None:
    """Small ones leave little of the state in a result: whether it is used cannot be told by its size."""
    model = make_hybrid("Mamba")
    for parameter in model.backbone.layers[0].parameters():
        torch.nn.init.normal_(parameter, std=std)
    prompts = make_prompts([30, 21, 9])
    want = [generate_alone(model, p, greedy(10)) for p in prompts]
    results = model.generate_batch(prompts, greedy(10), EngineConfig(prefill_chunk=5))
    assert [r.generated_tokens for r in results.values()] == want
    with interception.installed():
        assert trace_layers(model).recurrent.restarting == {type(model.backbone.layers[0].mixer)}


def test_a_replaced_forward_is_an_error() -> None:
    model = make_hybrid("Mamba")
    with model.continuous_batching_context_manager() as manager:
        manager.submit(make_prompts([5])[0], greedy(2)).result(timeout=60)
        for layer in model.backbone.layers:
            layer.mixer.forward = functools.partial(type(layer.mixer).forward.__wrapped__, layer.mixer)
        with pytest.raises(ModelChangedError, match="4 modules that must see each request by itself were not reached"):
            manager.submit(make_prompts([5])[0], greedy(2)).result(timeout=60)


def test_hooks_that_come_after_the_verdict() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = make_hybrid("Bamba")
    prompts = make_prompts([1, 5, 30])
    want = [generate_alone(model, p, greedy(6)) for p in prompts]
    hf_cb.explain(model)
    accelerate.cpu_offload(model)
    assert [r.generated_tokens for r in model.generate_batch(prompts, greedy(6)).values()] == want


def test_a_forward_that_somebody_else_has_put_into_the_class() -> None:
    cls = transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv
    original = cls.forward
    model = make_hybrid("Lfm2")
    prompts = make_prompts([1, 5, 30])
    want = [generate_alone(model, p, greedy(6)) for p in prompts]
    model.generate_batch(prompts, greedy(2))

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    cls.forward = theirs  # not by monkeypatch: that would put our wrapper back, which stands there now
    try:
        assert [r.generated_tokens for r in model.generate_batch(prompts, greedy(6)).values()] == want
        hf_cb.unpatch()
        assert cls.forward is theirs
    finally:
        hf_cb.unpatch()
        cls.forward = original
        hf_cb.patch()


def test_explain_names_the_states() -> None:
    text = str(hf_cb.explain(make_hybrid("Bamba")))
    assert "2 with a state (BambaMixer)" in text and "bytes a request" in text
