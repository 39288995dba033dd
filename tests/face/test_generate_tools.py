"""Tools that call `generate`: transformers' pipeline and lm-evaluation-harness give the same outputs, by the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from tiny_models import make_model, make_tokenizer

import hf_cb
from hf_cb.bench.faces import FACES, compare

TEXTS = ["the answer", "a", "the END of the answer is", "b c d", "hello", "and the", "1, 2, 3", "the the the"] * 3
CHATS = [[{"role": "user", "content": text}] for text in TEXTS[:5]]


@pytest.fixture
def model() -> Iterator[Any]:
    model = make_model()
    model.generation_config.eos_token_id = [2, 30, 41, 60]  # so that rows end at different places
    yield model
    hf_cb.restore(model)


def test_pipelines(model, ways) -> None:
    tokenizer = make_tokenizer()
    options = dict(batch_size=8, max_new_tokens=20, do_sample=False)
    seen = []
    for switch in (hf_cb.restore, lambda m: hf_cb.accelerate(m, modules="off")):
        pipe = transformers.pipeline("text-generation", model=switch(model), tokenizer=tokenizer)
        seen.append([pipe(TEXTS, **options), pipe(CHATS, **options), pipe("the", max_new_tokens=3, do_sample=False)])
    assert seen[0] == seen[1] and ways.take() == []


@pytest.mark.parametrize("name", FACES)
def test_the_comparison(model, ways, name: str) -> None:
    if name == "harness":
        pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    equal, before, after = compare(FACES[name], model, make_tokenizer(), TEXTS, 20)
    assert equal == len(TEXTS) and before > 0 and after > 0
    assert ways.take() == [], "all calls went through the engine"
