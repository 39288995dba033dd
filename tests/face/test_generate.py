"""`model.generate` of an accelerated model: the same tensors as without, by the engine."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from routed import EOS, PROMPTS, padded, same
from tiny_models import make_tokenizer
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TextIteratorStreamer,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

GREEDY = dict(do_sample=False, max_new_tokens=12)


CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "ragged ends": dict(do_sample=False, max_new_tokens=40, eos_token_id=EOS),
    "no end-of-sequence token": GREEDY | dict(eos_token_id=None),
    "another pad token": dict(do_sample=False, max_new_tokens=40, eos_token_id=EOS, pad_token_id=7),
    "one token": GREEDY | dict(max_new_tokens=1),
    "max_length": dict(do_sample=False, max_length=20),
    "min_new_tokens": dict(do_sample=False, max_new_tokens=30, min_new_tokens=9, eos_token_id=EOS),
    "min_length": dict(do_sample=False, max_length=40, min_length=18, eos_token_id=EOS),
    "config": dict(generation_config=GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=EOS)),
    "repetition": dict(do_sample=False, max_new_tokens=30, repetition_penalty=1.4, eos_token_id=EOS),
    "n-grams": dict(do_sample=False, max_new_tokens=30, no_repeat_ngram_size=2, eos_token_id=EOS),
    "bad words": GREEDY | dict(bad_words_ids=[[7], [12, 13]], suppress_tokens=[4], begin_suppress_tokens=[9, 11]),
    "forced end": GREEDY | dict(forced_eos_token_id=3, eos_token_id=3),
    "decay": dict(do_sample=False, max_new_tokens=30, exponential_decay_length_penalty=(3, 1.5), eos_token_id=EOS),
    "bias": GREEDY | dict(sequence_bias={(14,): 8.0, (15, 16): -5.0}, renormalize_logits=True),
    "several sequences": GREEDY | dict(do_sample=True, top_k=1, num_return_sequences=3),
    "prefix function": GREEDY | dict(prefix_allowed_tokens_fn=lambda row, ids: [10 + row, 20 + len(ids) % 7, 30]),
    "dict": dict(do_sample=False, max_new_tokens=30, eos_token_id=EOS, return_dict_in_generate=True),
    "no cache": GREEDY | dict(use_cache=False),
    "time to spare": GREEDY | dict(max_time=1000.0),
    "their processor": GREEDY | dict(logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])),
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_same_tensor(models, ways, options: dict[str, Any]) -> None:
    plain, ours = models
    for inputs in (padded(), padded([PROMPTS[1], PROMPTS[1][::-1]]), padded(PROMPTS[:1])):
        want, got = (model.generate(**inputs, **options) for model in (plain, ours))
        assert same(got, want) and type(got) is type(want)
    assert ways.take() == []


def test_inputs_of_all_kinds(models, ways) -> None:
    plain, ours = models
    ids = padded()["input_ids"]
    for call in (
        lambda m: m.generate(ids, **GREEDY),  # the mask is told from the pad tokens
        lambda m: m.generate(inputs=ids[1:2], **GREEDY),
        lambda m: m.generate(ids, attention_mask=padded()["attention_mask"].bool(), **GREEDY),
        lambda m: m.generate(ids.int(), **GREEDY),  # int64 comes back
        lambda m: m.generate(ids.int(), max_time=100.0, **GREEDY),
        lambda m: m.generate(**GREEDY),  # from the token of the beginning
        lambda m: m.generate(None, GenerationConfig(max_new_tokens=3, do_sample=False)),
    ):
        assert same(call(ours), call(plain))
    assert ways.take() == []
    with torch.inference_mode():
        assert same(ours.generate(ids, **GREEDY), plain.generate(ids, **GREEDY))
    assert not ours.generate(ids, **GREEDY).is_inference()


def test_the_built_in_length_and_its_warning(models, ways) -> None:
    plain, ours = models
    seen = []
    for model in models:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen.append((model.generate(**padded(), do_sample=False), [str(w.message) for w in caught]))
    (want, said), (got, ours_said) = seen
    assert same(got, want) and got.shape[1] == 12 + 20
    assert ours_said == said and any("max_length" in text for text in said)
    assert ways.take() == []


def test_seeds(models, ways) -> None:
    _, ours = models
    options = dict(do_sample=True, temperature=3.0, max_new_tokens=20, num_return_sequences=2)

    def draw(seed: int) -> Any:
        set_seed(seed)
        return ours.generate(**padded(), **options)

    first, again, other = draw(1), draw(1), draw(2)
    assert same(again, first) and not same(other, first)
    assert not torch.equal(first[0], first[1]), "sequences of one prompt are drawn independently"
    assert ways.take() == []


@pytest.mark.parametrize("options", [GREEDY, GREEDY | dict(do_sample=True, top_k=1)], ids=["greedy", "sampled"])
def test_scores_and_logits(models, ways, options: dict[str, Any]) -> None:
    asked = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.3)
    for inputs, more in ((padded(PROMPTS[:1]), dict(eos_token_id=EOS)), (padded(), dict(eos_token_id=None))):
        want, got = (model.generate(**inputs, **options | asked | more) for model in models)
        assert same(got, want) and len(got.scores) == len(want.scores) == len(got.logits)
        for name in ("scores", "logits"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-4, rtol=1e-4)
    plain, ours = (m.generate(**padded(), **GREEDY, return_dict_in_generate=True, output_scores=False) for m in models)
    assert plain.scores is None and ours.scores is None and ours.logits is None
    assert ways.take() == []


class Recorder(StoppingCriteria):
    """Stops each row at a token of its own, remembers that per row as evaluation harnesses do, and keeps what it saw.

    With `whole` it says yes only for all rows at once.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.seen: list[torch.Tensor] = []
        self.done: list[bool] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.seen.append(input_ids.clone())
        self.done = self.done or [False] * len(input_ids)
        for row, ids in enumerate(input_ids):
            self.done[row] |= int(ids[-1]) % (row + 3) == 0
        return all(self.done) if self.whole else torch.tensor(self.done)


@pytest.mark.parametrize("eos", [EOS, 2, None], ids=["early ends", "late ends", "no ends"])
@pytest.mark.parametrize("whole", [True, False])
def test_criteria_of_the_callers_see_what_generate_shows_them(models, ways, whole: bool, eos: Any) -> None:
    seen = []
    for model in models:
        criteria = Recorder(whole)
        out = model.generate(
            **padded(), do_sample=False, max_new_tokens=40, eos_token_id=eos, stopping_criteria=[criteria]
        )
        seen.append((out, criteria.seen))
    (want, shown), (got, ours) = seen
    assert same(got, want) and len(shown) == len(ours) and all(map(torch.equal, shown, ours))
    assert ways.take() == []


def test_stop_strings(models, ways) -> None:
    tokenizer = make_tokenizer()
    words = [tokenizer.decode([i]) for i in (30, 41, 50, 60)]
    for options in (dict(eos_token_id=2), dict(eos_token_id=None)):
        want, got = (
            m.generate(
                **padded(), do_sample=False, max_new_tokens=40, stop_strings=words, tokenizer=tokenizer, **options
            )
            for m in models
        )
        assert same(got, want) and got.shape[1] < 52
    assert ways.take() == []


class Heard(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Any) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def test_a_streamer_hears_the_same(models, ways) -> None:
    for inputs in (padded(PROMPTS[:1]), padded()):
        heard = []
        for model in models:
            streamer = Heard()
            model.generate(**inputs, do_sample=False, max_new_tokens=30, eos_token_id=EOS, streamer=streamer)
            heard.append(streamer.heard)
        assert heard[0] == heard[1] and heard[1][-1] == "end"
    assert ways.take() == []


def test_text_streamers(models, ways) -> None:
    plain, ours = models
    tokenizer = make_tokenizer()
    texts = []
    for model in models:
        streamer = TextIteratorStreamer(tokenizer)
        model.generate(**padded(PROMPTS[:1]), **GREEDY, streamer=streamer)
        texts.append("".join(streamer))
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="batch size 1"):
        ours.generate(**padded(), **GREEDY, streamer=TextIteratorStreamer(tokenizer))
    assert ways.take() == []


class Shape(LogitsProcessor):
    """Prefers tokens by what it is shown."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        scores[:, int(input_ids.sum()) % 100] += 30
        return scores


def test_a_processor_of_the_callers_sees_its_row_with_the_padding(models, ways) -> None:
    plain, ours = models
    ids = torch.tensor([[0, 0, *PROMPTS[0]]])
    for mask in (torch.ones_like(ids), (ids != 0).long()):
        want, got = (
            m.generate(ids, attention_mask=mask, **GREEDY, logits_processor=LogitsProcessorList([Shape()]))
            for m in models
        )
        assert same(got, want)
    assert ways.take() == []
