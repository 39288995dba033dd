"""Which path a model takes is measured; on every path the answers are `generate`'s."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from tiny_models import SHAPE, generate_alone, greedy, make_model, make_prompts
from transformers import masking_utils

import hf_cb
from hf_cb import EngineConfig, UnsupportedModelError
from hf_cb.manager import paths, probe
from hf_cb.models.dense import DenseModel
from hf_cb.models.paged import PagedModel
from hf_cb.models.twin import make_twin, shrink, spread_weights

pytestmark = pytest.mark.usefixtures("patched")
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

# class prefix -> (path, what its config needs): sinks, experts, several attention calls a layer, chunks, latent
# attention; then position biases, recurrent layers beside attention or alone, state kept in the modules
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "GptOss": ("paged", {**MOE, "head_dim": 16, "sliding_window": 8}),
    "Mixtral": ("paged", MOE),
    "Olmoe": ("paged", MOE),
    "DiffLlama": ("paged", {}),
    "Llama4": ("paged", {**MOE, "_config": "Llama4TextConfig", "head_dim": 16, "attention_chunk_size": 8}),
    "DeepseekV3": (
        "paged",
        {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 1, "moe_intermediate_size": 32, "head_dim": 8},
    ),
    "Bloom": ("dense", {"n_layer": 3, "n_head": 4}),
    "Falcon": ("dense", {}),
    "Mamba": ("paged", {}),
    "Lfm2": ("paged", {"layer_types": ["conv", "full_attention"] * 2}),
    "RecurrentGemma": ("recompute", {"num_hidden_layers": 3, "attention_window_size": 8}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_path_and_answers(name: str) -> None:
    path, changes = ARCHITECTURES[name]
    options = SHAPE | changes
    config = getattr(transformers, options.pop("_config", f"{name}Config"))(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    spread_weights(model)
    prompts = make_prompts([1, 7, 8, 17, 30])
    want = [generate_alone(model, p, greedy(8)) for p in prompts]
    for engine_config in (EngineConfig(block_size=4, max_batch_tokens=16), EngineConfig(max_batch_tokens=5)):
        got = [r.generated_tokens for r in model.generate_batch(prompts, greedy(8), engine_config).values()]
        assert got == want
    assert hf_cb.explain(model).path == path


def test_the_reason_is_said_once(caplog) -> None:
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**SHAPE, n_layer=2, n_head=4)).eval()
    with caplog.at_level(logging.WARNING, logger="hf_cb"):
        model.generate_batch(make_prompts([3]), greedy(2))
        model.generate_batch(make_prompts([3]), greedy(2))
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "BloomForCausalLM takes the dense path, which is slower"
    ]
    assert "dense" in str(hf_cb.explain(model)) and "paged:" in hf_cb.explain(model).reason


def test_dense_requests_come_and_go() -> None:
    """Cancelled, preempted and finished ones leave no cache behind."""
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**SHAPE, n_layer=2, n_head=4)).eval()
    prompts = make_prompts([20, 19, 18, 17])
    want = [generate_alone(model, p, greedy(20)) for p in prompts]
    config = EngineConfig(block_size=4, num_blocks=14)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            handles = [manager.submit(p, greedy(20)) for p in prompts]
            cancelled = manager.submit(prompts[0], greedy(20))
        next(iter(handles[0]))
        cancelled.cancel()
        results = [h.result() for h in handles]
        assert cancelled.result().finish_reason in ("cancelled", "length")
    assert [r.generated_tokens for r in results] == want
    assert sum(r.metrics.preemptions for r in results) > 0
    assert isinstance(manager.engine.runner, DenseModel) and len(manager.engine.runner) == 0
    manager.engine.check_idle()


def test_several_sequences_on_the_dense_path() -> None:
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**SHAPE, n_layer=2, n_head=4)).eval()
    prompt = make_prompts([9])[0]
    options = greedy(5, do_sample=True, top_k=1, num_return_sequences=2)
    results = model.generate_batch([prompt], options)
    assert [r.generated_tokens for r in results.values()] == [generate_alone(model, prompt, greedy(5))] * 2


def test_a_backend_by_name_needs_the_paged_path() -> None:
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**SHAPE, n_layer=2, n_head=4)).eval()
    with pytest.raises(ValueError, match="attention='reference' needs the paged path.*BloomForCausalLM.*dense"):
        model.generate_batch(make_prompts([3]), greedy(2), EngineConfig(attention="reference"))
    with pytest.raises(ValueError, match="cpu_offload_space=1000000 needs the paged path"):
        model.generate_batch(make_prompts([3]), greedy(2), EngineConfig(cpu_offload_space="1MB"))


def test_an_unknown_mask_keeps_a_model_off_the_paged_path(llama, monkeypatch) -> None:
    make = masking_utils.create_causal_mask

    def odd(*args, **kwargs):
        return make(*args, **kwargs, or_mask_function=lambda b, h, q, k: q < k - 1000)

    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", odd)
    found = hf_cb.explain(llama)
    assert found.path == "dense" and "mask that is neither causal, sliding nor chunked" in found.reason


def test_attention_that_never_arrives_keeps_a_model_off_the_paged_path(llama, monkeypatch) -> None:
    for layer in llama.model.layers:
        monkeypatch.setattr(layer.self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    found = hf_cb.explain(llama)
    assert found.path == "dense" and "has a forward that is not its class's" in found.reason


def test_a_model_on_which_no_path_agrees_is_refused(llama, monkeypatch) -> None:
    forward = llama.model.forward
    calls = iter(range(10_000))

    def moody(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * (1 + next(calls) % 7)
        return out

    monkeypatch.setattr(llama.model, "forward", moody)
    monkeypatch.setattr(probe, "SMALL", 0)  # a copy would not be moody
    monkeypatch.setattr(probe, "make_twin", lambda model: None)
    with pytest.raises(UnsupportedModelError, match="no path agrees.*paged: its logits.*dense:.*recompute:"):
        llama.generate_batch(make_prompts([3]), greedy(2))


@pytest.mark.parametrize("wrong", ["window", "scale"])
def test_the_probe_notices_a_wrong_layer(monkeypatch, wrong: str) -> None:
    """A window that the paged path does not respect shows only past it; the twin's is short enough."""
    import dataclasses

    plan_paged = paths.plan_paged

    def careless(model, options, need):
        plan = plan_paged(model, options, need)
        change = {"window": None} if wrong == "window" else {"scale": 0.3}
        plan.trace.layers[:] = [dataclasses.replace(layer, **change) for layer in plan.trace.layers]
        return plan

    monkeypatch.setattr(paths, "plan_paged", careless)
    found = hf_cb.explain(make_model("Mistral"))
    assert found.path in ("dense", "single") and "paged: its logits are not generate's (off by" in found.reason


def test_twins_are_small_and_of_the_same_class() -> None:
    config = transformers.Gemma3TextConfig()
    small = shrink(config)
    assert small.sliding_window == 8 and len(small.layer_types) == 7 and config.sliding_window == 4096
    model = make_model("Qwen2")
    state = torch.random.get_rng_state()
    twin = make_twin(model)
    assert type(twin) is transformers.Qwen2ForCausalLM and twin.config.sliding_window == 8
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_verdict_is_measured_once(monkeypatch) -> None:
    model = make_model("Llama", num_hidden_layers=3)
    runs = []
    run = probe._run
    monkeypatch.setattr(probe, "_run", lambda *args: runs.append(1) or run(*args))
    model.generate_batch(make_prompts([3]), greedy(2))
    first = len(runs)
    model.generate_batch(make_prompts([3]), greedy(2))
    assert first > 0 and len(runs) == first


@pytest.mark.real_model
def test_the_real_model_is_paged() -> None:
    model, _ = hf_cb.demo_model()
    found = hf_cb.explain(model)
    assert (found.path, found.backend) == ("paged", "cpu")
    with model.continuous_batching_context_manager() as manager:
        assert isinstance(manager.engine.runner, PagedModel)
