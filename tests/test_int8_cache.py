"""`kv_dtype="int8"`: a cache of half the size, whose answers are nearly those of the full one, and are its own whatever
else happens in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import greedy, make_model, make_prompts

import hf_cb
from hf_cb import EngineConfig, OptionError
from hf_cb.attention import interception
from hf_cb.attention.cpu import CpuBackend
from hf_cb.core import GenerationOutput
from hf_cb.kernels.cpu import library as lib
from hf_cb.models.plan import plan_paged

needs_library = pytest.mark.skipif(lib.library() is None, reason=f"no compiled kernels: {lib.problem()}")
PROMPTS = make_prompts([30, 5, 17, 60, 1, 44])
NEW_TOKENS = 24


def answers(model: Any, prompts: Any = PROMPTS, config: Any = None, **options: Any) -> list[GenerationOutput]:
    engine = EngineConfig(kv_dtype="int8", **options)
    got = list(model.generate_batch(prompts, config or greedy(NEW_TOKENS), engine).values())
    assert [r.error for r in got] == [None] * len(got)
    return got


def tokens(results: list[GenerationOutput]) -> list[list[int]]:
    return [r.generated_tokens for r in results]


@pytest.fixture
def fused() -> Iterator[Any]:
    """A model whose steps are native calls: a request's tokens then depend on nothing else, bit for bit."""
    model = make_model("Llama")
    hf_cb.accelerate(model)
    yield model
    hf_cb.restore(model)


def check_near(model: Any, results: list[GenerationOutput], prompts: Any = PROMPTS) -> None:
    """Against the model's own logits on the same prefixes: nearly always the best token, and near in probability."""
    best, off = [], []
    for prompt, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + result.generated_tokens])).logits[0, len(prompt) - 1 : -1]
        ids = torch.tensor(result.generated_tokens)
        best.append(logits.argmax(-1) == ids)
        off.append(logits.log_softmax(-1).gather(1, ids[:, None])[:, 0] - torch.tensor(result.logprobs))
    assert torch.cat(best).float().mean() >= 0.9
    assert torch.cat(off).abs().mean() <= 0.1


@needs_library
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3", "Phi3", "GPTNeoX"])
@pytest.mark.parametrize("modules", ["off", "fused"])
def test_answers_are_near_those_of_the_full_cache(family: str, modules: Any) -> None:
    """In prompts, chunks and decodes of one step."""
    model = make_model(family)
    hf_cb.accelerate(model, modules=modules)
    results = answers(model, block_size=16, max_batch_tokens=20, return_logprobs=True)
    hf_cb.restore(model)
    check_near(model, results)


@needs_library
def test_native_steps_and_the_models_own_modules_agree() -> None:
    model = make_model("Llama")
    hf_cb.accelerate(model, kv_dtype="int8")
    assert "one native call" in hf_cb.explain(model).modules
    native = answers(model, return_logprobs=True)
    own = answers(model, modules="off", return_logprobs=True)
    hf_cb.restore(model)
    assert tokens(native) == tokens(own)
    # a key that rounds to the other of two neighbours moves more than float32 does
    for x, y in zip(native, own, strict=True):
        assert x.logprobs == pytest.approx(y.logprobs, abs=2e-2)


@needs_library
def test_a_request_depends_on_itself_alone(fused: Any) -> None:
    want = [tokens(answers(fused, [prompt]))[0] for prompt in PROMPTS]
    for block_size, budget in ((16, 1000), (4, 7), (32, 40)):
        assert tokens(answers(fused, block_size=block_size, max_batch_tokens=budget)) == want


@needs_library
def test_prefix_hits_change_nothing(fused: Any) -> None:
    start = make_prompts([33])[0]
    prompts = [start + end for end in make_prompts([1, 2, 9], seed=2)] + [start, start[:32]]
    want = [tokens(answers(fused, [prompt]))[0] for prompt in prompts]
    config = EngineConfig(kv_dtype="int8", block_size=4)
    with fused.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        got = [manager.submit(p, greedy(NEW_TOKENS)).result() for p in prompts for _ in (1, 2)]
    assert tokens(got) == [w for w in want for _ in (1, 2)]
    assert [r.metrics.cached_tokens > 0 for r in got] == [False] + [True] * (len(got) - 1)


@needs_library
def test_sequences_of_one_prompt_copy_its_last_block(fused: Any) -> None:
    prompt = make_prompts([21])[0]
    (want,) = tokens(answers(fused, [prompt]))
    sampled = greedy(NEW_TOKENS, do_sample=True, top_k=1, num_return_sequences=3)
    got = answers(fused, [prompt], sampled, block_size=4)
    assert tokens(got) == [want] * 3
    assert [r.metrics.cached_tokens for r in got] == [0, 20, 20]


@needs_library
def test_preempted_requests_go_on(fused: Any) -> None:
    prompts = make_prompts([20, 19, 18, 17, 16, 15])
    want = tokens(answers(fused, prompts))
    config = EngineConfig(kv_dtype="int8", block_size=4, num_blocks=15, max_batch_tokens=24)
    with fused.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            handles = [manager.submit(p, greedy(NEW_TOKENS)) for p in prompts]
        got = [h.result() for h in handles]
    assert tokens(got) == want
    assert sum(r.metrics.preemptions for r in got) > 0


@needs_library
@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 1.8), (torch.float16, 1.8), (torch.float32, 3.5)])
def test_the_cache_holds_more_tokens(dtype: torch.dtype, least: float) -> None:
    model = make_model("Llama", hidden_size=256).to(dtype)  # heads of 64
    with interception.installed():
        plans = [plan_paged(model, EngineConfig(kv_budget="4MiB", kv_dtype=kv)) for kv in (None, "int8")]
    full, small = (plan.config.num_blocks * plan.config.block_size for plan in plans)
    assert small >= least * full
    for plan in plans:
        backend, layer = plan.backend, plan.trace.layers[0]
        assert isinstance(backend, CpuBackend)
        cache = backend.allocate(layer, 7, plan.config.block_size).cache
        assert sum(t.nbytes for t in cache if t is not None) == 7 * backend.block_bytes(layer, plan.config.block_size)


@needs_library
def test_explain_says_so(shared_llama: Any) -> None:
    hf_cb.patch(kv_dtype="int8")
    found = hf_cb.explain(shared_llama)
    assert found.backend == "cpu" and "int8" in str(found.backend_reason)
    assert "MiB of int8" in found.config["kv_cache"]


@pytest.mark.parametrize("value", ["int4", "float8", torch.int8, True])
def test_another_value_is_refused_by_name(value: Any) -> None:
    with pytest.raises(OptionError, match="kv_dtype=.*int8"):
        EngineConfig(kv_dtype=value)


@pytest.mark.usefixtures("patched")
def test_another_backend_is_refused(shared_llama: Any) -> None:
    with pytest.raises(OptionError, match="kv_dtype='int8' needs attention='cpu', not 'reference'"):
        shared_llama.generate_batch([[5]], greedy(1), EngineConfig(kv_dtype="int8", attention="reference"))


@pytest.mark.usefixtures("patched")
def test_where_the_cpu_backend_cannot_run_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "unsupported", lambda self, layer: "it computes elsewhere")
    with pytest.raises(OptionError, match="cannot run this model: it computes elsewhere. Leave kv_dtype unset"):
        make_model().generate_batch([[5]], greedy(1), EngineConfig(kv_dtype="int8"))


@pytest.mark.usefixtures("patched")
def test_other_paths_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_cb.manager.probe, "PATHS", ("dense",))
    with pytest.raises(OptionError, match="kv_dtype='int8' needs the paged path.*Leave kv_dtype unset"):
        make_model().generate_batch([[5]], greedy(1), EngineConfig(kv_dtype="int8"))
