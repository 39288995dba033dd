"""The same seed gives the same tokens, however a request is run; without one, requests differ."""

from __future__ import annotations

import functools

import pytest
from option_cases import PROMPT, SAMPLERS, manager_of
from tiny_models import make_model, make_prompts
from transformers import PreTrainedModel, set_seed

from hf_cb import EngineConfig
from hf_cb.seeds import derive_seed

pytestmark = pytest.mark.usefixtures("patched")
SAMPLED = dict(do_sample=True, temperature=1.4, top_k=0, top_p=0.95, max_new_tokens=16, eos_token_id=-1)
KINDS = {  # how it is drawn
    "warped": {},
    "penalised": dict(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 2.0}),
    "by row": dict(typical_p=0.9, no_repeat_ngram_size=3),
}
RUNS = {
    "chunks of 2": dict(max_batch_tokens=2, prefill_chunk=2),
    "blocks of 16": dict(block_size=16),
    "no prefix cache": dict(prefix_caching=False),
    "one at a time": dict(max_num_seqs=1),
}


@functools.cache
def model() -> PreTrainedModel:
    return make_model(num_hidden_layers=2)


@functools.cache
def alone(kind: str) -> list[int]:
    with manager_of(model(), "native") as manager:
        return manager.submit(PROMPT, **SAMPLED, **KINDS[kind], seed=5).result().generated_tokens


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_however_it_is_run(kind: str, run: str) -> None:
    with manager_of(model(), "native", **RUNS[run]) as manager:
        mates = [manager.submit(p, **SAMPLED) for p in make_prompts([3, 15, 8])]
        handle = manager.submit(PROMPT, **SAMPLED, **KINDS[kind], seed=5)
        streamed = [token for delta in handle for token in delta.token_ids]
        assert streamed == handle.result().generated_tokens == alone(kind)
        for mate in mates:
            mate.result()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", SAMPLERS)
def test_with_mates_and_giving_way(kind: str, way: str) -> None:
    with manager_of(model(), way, num_blocks=16) as manager:
        with manager.pause():
            mates = [manager.submit(p, **SAMPLED) for p in make_prompts([3, 15, 8, 12])]
            handle = manager.submit(PROMPT, **SAMPLED, **KINDS[kind], seed=5)
        result = handle.result()
        assert result.generated_tokens == alone(kind)
        assert result.metrics.preemptions + sum(m.result().metrics.preemptions for m in mates) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_of_several_sequences_each_is_as_if_alone_with_its_own_seed(kind: str) -> None:
    with manager_of(model(), "native", block_size=4) as manager:
        options = SAMPLED | KINDS[kind]
        several = manager.submit(PROMPT, **options, seed=5, num_return_sequences=4).results()
        single = [manager.submit(PROMPT, **options, seed=derive_seed(5, i)).result() for i in range(4)]
    assert several[0].generated_tokens == alone(kind)
    assert [r.generated_tokens for r in several] == [r.generated_tokens for r in single]
    assert len({tuple(r.generated_tokens) for r in several}) == 4
    assert [r.metrics.cached_tokens for r in several] == [0, 11, 11, 11], "they share the prompt's keys and values"


@pytest.mark.parametrize("kind", KINDS)
def test_streams_and_whole_calls(kind: str) -> None:
    options = SAMPLED | KINDS[kind]
    (whole,) = model().generate_batch([PROMPT], seed=5, **options).values()
    parts = [t for delta in model().stream_batch([PROMPT], seed=5, **options) for t in delta.token_ids]
    (item,) = model().iterate_batch([PROMPT], seed=5, **options)
    assert whole.generated_tokens == parts == item.generated_tokens == alone(kind)


def test_without_a_seed_each_request_has_its_own() -> None:
    outputs = []
    for _ in range(2):
        set_seed(1)
        results = model().generate_batch([PROMPT] * 6, **SAMPLED).values()
        outputs.append([tuple(r.generated_tokens) for r in results])
    assert outputs[0] == outputs[1], "set_seed repeats a call"
    assert len(set(outputs[0])) == 6
    seeded = model().generate_batch([PROMPT] * 6, None, EngineConfig(seed=1), **SAMPLED).values()
    assert len({tuple(r.generated_tokens) for r in seeded}) == 6


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**70])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    first, second = (
        next(iter(model().generate_batch([PROMPT], seed=seed, **SAMPLED).values())).generated_tokens for _ in range(2)
    )
    assert first == second
