"""generate_batch, stream_batch, iterate_batch: input forms, order, options with the meaning they have in `generate`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from tiny_models import generate_alone, greedy, make_prompts
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
    set_seed,
)

from hf_cb import EngineConfig

pytestmark = pytest.mark.usefixtures("patched")
PROMPTS = make_prompts([5, 12, 3])


def tokens(results) -> list[list[int]]:
    return [r.generated_tokens for r in results.values()]


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        at = slice(12 - len(prompt), 12) if side == "left" else slice(0, len(prompt))
        ids[row, at], mask[row, at] = torch.tensor(prompt), 1
    return ids, mask


def test_input_forms(shared_llama) -> None:
    want = [generate_alone(shared_llama, p, greedy()) for p in PROMPTS]
    left, right = padded("left"), padded("right")
    forms = {
        "lists": dict(inputs=PROMPTS),
        "tuples": dict(inputs=tuple(tuple(p) for p in PROMPTS)),
        "tensors": dict(inputs=[torch.tensor(p) for p in PROMPTS]),
        "arrays": dict(inputs=[torch.tensor(p).numpy() for p in PROMPTS]),
        "generator": dict(inputs=(p for p in PROMPTS)),
        "left padded": dict(inputs=left[0], attention_mask=left[1]),
        "right padded": dict(inputs=right[0], attention_mask=right[1]),
        "as from a tokenizer": dict(input_ids=left[0], attention_mask=left[1], token_type_ids=left[0] * 0),
        "encoding": dict(inputs={"input_ids": PROMPTS, "attention_mask": [[1] * len(p) for p in PROMPTS]}),
    }
    for name, form in forms.items():
        assert tokens(shared_llama.generate_batch(generation_config=greedy(), **form)) == want, name
    assert tokens(shared_llama.generate_batch(PROMPTS[0], greedy())) == want[:1]
    assert tokens(shared_llama.generate_batch(torch.tensor(PROMPTS[0]), greedy())) == want[:1]
    assert shared_llama.generate_batch([]) == {}


def test_results_are_in_input_order_call_after_call(shared_llama) -> None:
    configs = [greedy(20), greedy(1), greedy(7)]
    want = [generate_alone(shared_llama, p, c) for p, c in zip(PROMPTS, configs, strict=True)]
    for call in range(2):
        results = shared_llama.generate_batch(PROMPTS, configs, persistent_manager=True)
        assert tokens(results) == want, f"call {call}"
        assert list(results) == [f"req_{3 * call + i}" for i in range(3)]
    shared_llama.destroy_cached_continuous_batching_manager()


def test_streamed_deltas_add_up(shared_llama) -> None:
    want = [generate_alone(shared_llama, p, greedy()) for p in PROMPTS]
    got: list[list[int]] = [[], [], []]
    ends = {}
    for delta in shared_llama.stream_batch(PROMPTS, greedy(), EngineConfig(max_batch_tokens=4)):
        assert delta.index not in ends, "nothing comes after the end"
        got[delta.index] += delta.token_ids
        if delta.finish_reason:
            ends[delta.index] = delta.finish_reason
    assert got == want and ends == {0: "length", 1: "length", 2: "length"}


def test_a_bad_prompt_in_a_stream(shared_llama) -> None:
    last = {d.index: d for d in shared_llama.stream_batch([PROMPTS[0], [], PROMPTS[1]], greedy(3))}
    assert last[1].finish_reason == "error" and "no token ids" in last[1].error
    assert last[0].finish_reason == last[2].finish_reason == "length"


def test_iterating_over_endless_inputs(shared_llama) -> None:
    taken = []

    def endless() -> Iterator[list[int]]:
        for i in itertools.count():
            taken.append(i)
            yield PROMPTS[i % 3]

    results = shared_llama.iterate_batch(endless(), greedy(3), EngineConfig(max_num_seqs=2))
    first = [next(results) for _ in range(10)]
    results.close()
    assert len(taken) <= 10 + 2 * 2 + 1, "read far ahead of what was needed"
    for result in first:
        assert result.generated_tokens == generate_alone(shared_llama, PROMPTS[result.index % 3], greedy(3))


def test_closing_a_stream_frees_everything(shared_llama) -> None:
    config = EngineConfig(block_size=4)
    stream = shared_llama.stream_batch(PROMPTS, greedy(200), config)
    next(stream)
    stream.close()
    assert len(tokens(shared_llama.generate_batch(PROMPTS, greedy(3), config))) == 3


def test_end_of_sequence_by_any_of_several_ids(shared_llama) -> None:
    free = generate_alone(shared_llama, PROMPTS[0], greedy(20))
    for eos in (free[4], [free[6], free[4]]):
        (result,) = shared_llama.generate_batch([PROMPTS[0]], greedy(20, eos_token_id=eos)).values()
        stop = free.index(free[4])
        assert result.finish_reason == "stop" and result.generated_tokens == free[: stop + 1]


def test_eos_comes_from_the_models_config_unless_named(shared_llama) -> None:
    from transformers import GenerationConfig

    eos = generate_alone(shared_llama, PROMPTS[0], greedy(20))[4]
    shared_llama.generation_config.eos_token_id = [eos, 3]
    try:
        partial = GenerationConfig(max_new_tokens=20, do_sample=False)
        (result,) = shared_llama.generate_batch([PROMPTS[0]], partial).values()
        assert result.finish_reason == "stop" and result.generated_tokens[-1] == eos
        (deaf,) = shared_llama.generate_batch([PROMPTS[0]], partial, eos_token_id=-1).values()
        assert deaf.finish_reason == "length"
    finally:
        shared_llama.generation_config.eos_token_id = 2


EARLY = [5, 9, 40, 77, -7]  # -7 stands for the token that comes third without any option

PROCESSED = {
    "repetition_penalty": dict(repetition_penalty=1.7),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.5),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=2),
    "bad_words_ids": dict(bad_words_ids=[[8], [10, 11]]),
    "sequence_bias": dict(sequence_bias=[[[7], 9.0], [[20, 21], -4.0]]),
    "min_new_tokens": dict(min_new_tokens=8, eos_token_id=EARLY),
    "min_length": dict(min_length=15, eos_token_id=EARLY),
    "forced_bos_token_id": dict(forced_bos_token_id=11),
    "forced_eos_token_id": dict(forced_eos_token_id=12),
    "suppress_tokens": dict(suppress_tokens=list(range(0, 100, 2))),
    "begin_suppress_tokens": dict(begin_suppress_tokens=list(range(0, 128, 2))),
    "exponential_decay_length_penalty": dict(exponential_decay_length_penalty=(3, 3.0), eos_token_id=EARLY),
    "renormalize_logits": dict(renormalize_logits=True),
    "remove_invalid_values": dict(remove_invalid_values=True),
    "guidance_scale": dict(guidance_scale=1.8),
    "watermarking_config": dict(watermarking_config=WatermarkingConfig(bias=6.0)),
}


def test_every_option_with_a_processor_in_one_mixed_batch(shared_llama) -> None:
    """Each request uses another option; each gets what `generate` answers with that option alone."""
    prompt = PROMPTS[1]
    plain = generate_alone(shared_llama, prompt, greedy(10))
    configs = [greedy(10, **options) for options in PROCESSED.values()]
    for config in configs:
        if config.eos_token_id == EARLY:
            config.eos_token_id = [plain[2] if i == -7 else i for i in EARLY]
    results = shared_llama.generate_batch([prompt] * len(configs), configs, EngineConfig(block_size=4))
    for (name, _), config, result in zip(PROCESSED.items(), configs, results.values(), strict=True):
        assert result.error is None, name
        assert result.generated_tokens == generate_alone(shared_llama, prompt, config), name
    assert sum(r.generated_tokens != plain for r in results.values()) >= 10, "most options were meant to matter"


def test_custom_processors_criteria_and_prefix_functions(shared_llama) -> None:
    class Odd(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert input_ids.shape[0] == 1
            return scores.index_fill(1, torch.arange(0, 128, 2), float("-inf"))

    class Three(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.tensor([input_ids.shape[1] >= len(PROMPTS[0]) + 3])

    options = dict(logits_processor=LogitsProcessorList([Odd()]), stopping_criteria=StoppingCriteriaList([Three()]))
    (result,) = shared_llama.generate_batch([PROMPTS[0]], greedy(), **options).values()
    assert result.generated_tokens == generate_alone(shared_llama, PROMPTS[0], greedy(), **options)
    assert result.finish_reason == "stop" and len(result.generated_tokens) == 3
    allowed = dict(prefix_allowed_tokens_fn=lambda batch, ids: [len(ids), len(ids) + 1])
    (result,) = shared_llama.generate_batch([PROMPTS[0]], greedy(), **allowed).values()
    assert result.generated_tokens == generate_alone(shared_llama, PROMPTS[0], greedy(), **allowed)


def test_a_processor_or_stop_check_that_raises_fails_its_own_request(shared_llama) -> None:
    def broken(*_, **__):
        raise ZeroDivisionError("mine")

    with shared_llama.continuous_batching_context_manager() as manager:
        bad = [
            manager.submit(PROMPTS[0], greedy(), logits_processor=[broken]),
            manager.submit(PROMPTS[0], greedy(), stopping_criteria=[broken]),
        ]
        good = manager.submit(PROMPTS[0], greedy())
        for handle in bad:
            with pytest.raises(ZeroDivisionError, match="mine"):
                handle.result(10)
        assert good.result().generated_tokens == generate_alone(shared_llama, PROMPTS[0], greedy())
    manager.engine.check_idle()


def test_sampling_repeats_with_the_seed_whatever_the_batch(shared_llama) -> None:
    sampled = greedy(10, do_sample=True, temperature=1.5, top_k=0)
    (alone,) = shared_llama.generate_batch([PROMPTS[0]], sampled, seed=3).values()
    with shared_llama.continuous_batching_context_manager() as manager:
        mates = [manager.submit(p, greedy(30, do_sample=True)) for p in PROMPTS]
        again = manager.submit(PROMPTS[0], sampled, seed=3).result()
        other = manager.submit(PROMPTS[0], sampled, seed=4).result()
        assert all(m.result().error is None for m in mates)
    assert again.generated_tokens == alone.generated_tokens != other.generated_tokens


def test_set_seed_repeats_a_call(shared_llama) -> None:
    sampled = greedy(10, do_sample=True, temperature=1.5, num_return_sequences=3)
    runs = []
    for seed in (1, 1, 2):
        set_seed(seed)
        runs.append(tokens(shared_llama.generate_batch(PROMPTS, sampled)))
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(t) for t in runs[0][:3]}) == 3, "the sequences of one prompt differ"


def test_a_manager_seed_repeats_too(shared_llama) -> None:
    sampled = greedy(10, do_sample=True, temperature=1.5)
    config = EngineConfig(seed=5)
    first, second = (tokens(shared_llama.generate_batch([PROMPTS[0]] * 2, sampled, config)) for _ in range(2))
    assert first == second and first[0] != first[1]


def test_timestamps_only_when_asked_for(shared_llama) -> None:
    (without,) = shared_llama.generate_batch([PROMPTS[0]], greedy(4)).values()
    (with_them,) = shared_llama.generate_batch([PROMPTS[0]], greedy(4), record_timestamps=True).values()
    assert without.timestamps is None and len(with_them.timestamps) == 4
    assert with_them.timestamps == sorted(with_them.timestamps)


def test_metrics(shared_llama) -> None:
    results = shared_llama.generate_batch([PROMPTS[1]] * 3, greedy(4), EngineConfig(max_num_seqs=1, block_size=4))
    for m in (r.metrics for r in results.values()):
        assert 0 <= m.queue_s <= m.ttft_s <= m.e2e_s and m.prefill_s > 0 and m.itl_s > 0
        assert m.prompt_tokens == 12
    assert [r.metrics.cached_tokens for r in results.values()] == [0, 8, 8]


def test_the_progress_bar_counts_requests_and_tokens(shared_llama, capsys) -> None:
    shared_llama.generate_batch(PROMPTS, greedy(4), progress_bar=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "tok/s" in shown


def test_an_interrupt_in_a_call_cancels_it_and_the_next_call_works(shared_llama, monkeypatch) -> None:
    from hf_cb.manager.handle import Handle

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Handle, "outputs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shared_llama.generate_batch(PROMPTS, greedy(240))
    want = generate_alone(shared_llama, PROMPTS[0], greedy())
    assert list(shared_llama.generate_batch([PROMPTS[0]], greedy()).values())[0].generated_tokens == want
