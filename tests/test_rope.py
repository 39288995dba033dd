"""Rotary scaling: each request of a mixed batch as if it were alone, on both sides of the original maximum."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from tiny_models import generate_alone, greedy, make_model, make_prompts
from transformers import modeling_rope_utils

import hf_cb
from hf_cb import EngineConfig, UnsupportedModelError
from hf_cb.models.plan import model_length
from hf_cb.models.rope import LengthDependentRope, Rule, forgets_prompt
from hf_cb.models.twin import make_twin

pytestmark = pytest.mark.usefixtures("patched")
ORIGINAL = 32
_BASE = {"rope_theta": 10000.0, "factor": 4.0}
_LONG = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL},
    **{"short_factor": [1 + i / 100 for i in range(8)], "long_factor": [1 + i / 5 for i in range(8)]},
}
_PHI_LONG = {"sliding_window": None, "original_max_position_embeddings": ORIGINAL, "rope_parameters": _LONG}
_DYNAMIC = {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "dynamic", **_BASE}}
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": ORIGINAL, **_BASE}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_BASE}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("Llama", {}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", **_BASE}}),
    "llama3": ("Llama", {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": ORIGINAL}}),
    "yarn": ("Llama", {"rope_parameters": _YARN}),
    "proportional": (
        "Llama",
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, **_BASE}},
    ),
    "dynamic": ("Llama", _DYNAMIC),
    "dynamic, with windows": ("Mistral", _DYNAMIC),
    "longrope": ("Llama", {"rope_parameters": {**_LONG, "factor": 8.0}}),
    "longrope, keys computed again": ("Phi3", _PHI_LONG),
    "by layer type": (
        "Gemma3",
        {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {**_LONG, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}
LENGTHS = [5, 20, 27, 31, 32, 33, 45, 60]


def alone(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """On a fresh model each: some scalings keep state."""
    source = inspect.getsource(type(model).prepare_inputs_for_generation)
    if "original_max" in source and "next_sequence_length" not in source:
        pytest.skip("generate of this transformers forgets the prompt where it drops the cache")
    if "long_inv_freq is None" not in inspect.getsource(modeling_rope_utils) and type(model).__name__.startswith(
        "Gemma3"
    ):
        pytest.skip("generate of this transformers cannot do longrope for some layers only")
    return [generate_alone(copy.deepcopy(model), p, greedy(new_tokens)) for p in prompts]


@pytest.mark.parametrize("case", CASES)
def test_mixed_batch(case: str) -> None:
    family, changes = CASES[case]
    model = make_model(family, **changes)
    prompts = make_prompts(LENGTHS)
    want = alone(model, prompts, 14)
    num_blocks = 60 if family == "Gemma3" else 28  # that one has six groups of layers
    narrow = EngineConfig(block_size=4, max_batch_tokens=16, num_blocks=num_blocks)
    configs = (EngineConfig(block_size=4), narrow)
    results = [list(model.generate_batch(prompts, greedy(14), c).values()) for c in configs]
    for batch in results:
        assert [r.generated_tokens for r in batch] == want
    assert hf_cb.explain(model).path == "paged"
    assert sum(r.metrics.preemptions for r in results[1]) > 0 or "windows" in case


@pytest.mark.parametrize("case", ["dynamic", "longrope", "longrope, keys computed again"])
def test_the_case_can_fail(case: str, monkeypatch) -> None:
    """Left to themselves, the rotary modules see the largest position of the batch."""
    family, changes = CASES[case]
    model = make_model(family, **changes)
    prompts = make_prompts(LENGTHS)
    want = alone(model, prompts, 14)

    def drives(self: LengthDependentRope, _: Any) -> dict[int, Any]:
        return {id(m): lambda forward, args, kwargs: forward(*args, **kwargs) for m in self.modules}

    monkeypatch.setattr(LengthDependentRope, "drives", drives)
    monkeypatch.setattr(hf_cb.manager.probe, "TOLERANCE", {torch.float32: 1e9})
    results = model.generate_batch(prompts, greedy(14), EngineConfig(block_size=4, max_batch_tokens=16))
    assert [r.generated_tokens for r in results.values()] != want


@pytest.mark.parametrize("case", ["dynamic", "longrope", "longrope, keys computed again"])
def test_prefixes_are_found_within_a_regime_only(case: str) -> None:
    """A prompt beyond the original maximum has other keys than the short prompt that it begins with."""
    family, changes = CASES[case]
    model = make_model(family, **changes)
    long = make_prompts([44])[0]
    short = long[:24]
    (want_short, want_long) = alone(model, [short, long], 6)
    config = EngineConfig(block_size=4)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        first = manager.submit(short, greedy(6)).result(timeout=60)
        second = manager.submit(long, greedy(6)).result(timeout=60)
        again = manager.submit(short, greedy(6)).result(timeout=60)
        long_again = manager.submit(long, greedy(6)).result(timeout=60)
    assert [first.generated_tokens, second.generated_tokens] == [want_short, want_long]
    assert [again.generated_tokens, long_again.generated_tokens] == [want_short, want_long]
    assert second.metrics.cached_tokens == 0
    assert again.metrics.cached_tokens == 20 and long_again.metrics.cached_tokens == 40


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_sequences_of_one_prompt_on_both_sides_of_the_crossing(max_num_seqs: int) -> None:
    """Some start when the first of them has crossed: they cannot take its keys."""
    model = make_model("Phi3", **_PHI_LONG)
    prompt = make_prompts([27])[0]
    options = greedy(30, do_sample=True, top_k=20, num_return_sequences=4, eos_token_id=list(range(3, 13)))
    for seed in (7, 10):
        config = EngineConfig(block_size=4, max_num_seqs=max_num_seqs, seed=seed, prefix_caching=False)
        alone_too = EngineConfig(block_size=4, max_num_seqs=1, seed=seed, prefix_caching=False)
        got, want = (
            [r.generated_tokens for r in model.generate_batch([prompt], options, c).values()]
            for c in (config, alone_too)
        )
        assert got == want


@pytest.mark.parametrize("path", ["paged", "single"])
def test_the_model_keeps_its_own_frequencies(path: str, monkeypatch) -> None:
    monkeypatch.setattr(hf_cb.manager.probe, "PATHS", (path,))
    model = make_model("Llama", **CASES["dynamic"][1])
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone()
    model.generate_batch(make_prompts([60]), greedy(3))
    assert torch.equal(rotary.inv_freq, before) and rotary.max_seq_len_cached == ORIGINAL


def test_a_model_that_has_seen_long_sequences() -> None:
    """`generate` leaves the frequencies of the longest sequence in the model; ours are those of a fresh one."""
    model = make_model("Llama", **CASES["dynamic"][1])
    prompts = make_prompts([40, 20])
    want = alone(model, prompts, 8)
    generate_alone(model, make_prompts([90])[0], greedy(3))
    assert [r.generated_tokens for r in model.generate_batch(prompts, greedy(8)).values()] == want


def test_the_single_path_too(monkeypatch) -> None:
    model = make_model("Llama", **CASES["dynamic"][1])
    prompts = make_prompts(LENGTHS)
    want = alone(model, prompts, 8)
    monkeypatch.setattr(hf_cb.manager.probe, "PATHS", ("dense", "single"))
    assert [r.generated_tokens for r in model.generate_batch(prompts, greedy(8)).values()] == want
    assert hf_cb.explain(model).path == "single"


@pytest.mark.parametrize("case", ["dynamic", "longrope", "longrope, keys computed again", "by layer type"])
def test_the_twin_crosses_its_original_maximum(case: str) -> None:
    family, changes = CASES[case]
    twin = make_twin(make_model(family, **changes))
    (rule,) = {r for rules in LengthDependentRope(twin)._rules.values() for r in rules.values()}
    kind = "dynamic" if case == "dynamic" else "longrope"
    # where generate forgets the prompt at the crossing, the twin is kept from it
    assert rule == Rule(kind, 10**6 if forgets_prompt(twin) else 24, "again" in case)


def test_dynamic_scaling_of_some_layers_goes_beyond_the_positions() -> None:
    layers = {"full_attention": _DYNAMIC["rope_parameters"], "sliding_attention": {"rope_type": "default"}}
    layers["sliding_attention"]["rope_theta"] = 10000.0
    assert model_length(make_model("Gemma3", max_position_embeddings=ORIGINAL, rope_parameters=layers)) == 128


def test_an_unknown_scaling_is_refused_by_name() -> None:
    model = make_model("Llama")
    model.config.rope_parameters = {"rope_type": "spiral", "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="'spiral' rotary scaling.*known: default, dynamic"):
        model.generate_batch(make_prompts([3]), greedy(2))
