"""Rows of a recorded step that are nobody's, or whose request fails, change nothing for the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captured_models import Harness
from tiny_models import generate_alone, greedy, make_model, make_prompts

from hf_cb.attention import interception
from hf_cb.core import Request, SamplingParams
from hf_cb.models.recorded.captured import ladder
from hf_cb.steps import StepBatch
from hf_cb.warpers import Warpers

PROMPTS = make_prompts([9, 1, 26, 14, 5])


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    interception.install(__name__)
    yield
    interception.uninstall(__name__)


def test_padding_is_requests_of_one_token_which_write_nothing() -> None:
    harness = Harness(make_model("Gemma3"), max_num_seqs=8)  # layers of two kinds
    harness.engine.recovers = False
    harness.runner.warm_up()
    inputs, found = harness.runner._inputs, list[Any]()
    fill = inputs.fill

    def checked(batch: StepBatch, size: int) -> None:
        fill(batch, size)
        rows, fixed = len(batch.seq_lens_list), inputs.with_ids(size)
        width = max(group.block_table.shape[1] for group in batch.groups)
        slots = [group.slot_mapping[rows:] for group in fixed.groups]
        tables = [group.block_table[rows:, :width] for group in fixed.groups]
        assert set(fixed.seq_lens[rows:].tolist()) <= {1} and not fixed.input_ids[rows:].any()
        assert all(set(each.tolist()) <= {-1} for each in slots) and not any(each.any() for each in tables)
        found.append(size - rows)

    inputs.fill = checked
    harness.tokens(PROMPTS)
    harness.tokens(PROMPTS[:3])
    assert len(found) == harness.replays > 8 and max(found) == 3
    for storage in harness.runner.storages:
        assert storage.k[1:].any() and not storage.k[0].any() and not storage.v[0].any(), "the null block is nobody's"


@pytest.mark.parametrize("options", [{}, dict(do_sample=True, warpers=Warpers()), dict(logprobs=True, top_logprobs=2)])
@pytest.mark.parametrize("more", [dict(overlap=False), dict(overlap=True), dict(overlap=True, max_batch_tokens=9)])
def test_a_row_without_numbers_ends_its_own_request(options: dict[str, Any], more: dict[str, Any]) -> None:
    """The step behind it is launched with what there is for a token, which must be one."""
    model = make_model("Llama")
    want = [generate_alone(model, prompt, greedy(20)) for prompt in PROMPTS]
    told = {token for tokens in (*want[1:], *PROMPTS) for token in tokens}
    place, bad = next((i, token) for i, token in enumerate(want[0]) if i > 2 and token not in told)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    harness = Harness(model, max_num_seqs=8, **more)
    harness.engine.recovers = False
    drawn = Request("drawn", [bad], SamplingParams(4, **options))  # fails at its first token
    requests = [Request(f"r{i}", prompt, SamplingParams(20)) for i, prompt in enumerate(PROMPTS)]
    for request in (*requests, drawn):
        harness.engine.admit(request)
    while harness.engine.has_work:
        harness.engine.step()
    assert harness.replays > 8
    assert [r.output_ids for r in requests] == [want[0][: place + 1], *want[1:]] and drawn.output_ids == []
    assert [r.request_id for r in (*requests, drawn) if r.exception is not None] == ["r0", "drawn"]
    assert "contain NaN" in str(requests[0].exception) and "contain NaN" in str(drawn.exception)
    harness.engine.check_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_that_come_token_by_token(overlap: bool) -> None:
    """Each request has one token in a step then, and not each has a row of logits."""
    harness = Harness(make_model("Llama"), overlap=overlap, max_num_seqs=2, max_batch_tokens=2)
    harness.engine.recovers = False
    assert harness.tokens(PROMPTS[:3]) == [generate_alone(harness.model, p, greedy(10)) for p in PROMPTS[:3]]
    assert harness.replays


def test_prompts_that_are_scored_token_by_token() -> None:
    """Each has a row of logits then too, from which nothing is sampled."""
    drawn: Any = dict(do_sample=True, seed=5, warpers=Warpers())
    found = []
    for budget in (2, 64):
        harness = Harness(make_model("Llama"), overlap=True, max_num_seqs=2, max_batch_tokens=budget)
        harness.engine.recovers = False
        made = [Request(f"r{i}", p, SamplingParams(8, prompt_logprobs=1, **drawn)) for i, p in enumerate(PROMPTS[:4])]
        made[0].params = SamplingParams(30, **drawn)
        harness.run(made)
        assert harness.replays > 8 and len(made[2].prompt_logprobs) == len(PROMPTS[2]) - 1
        found.append(made)
    for alone, together in zip(*found, strict=True):
        assert alone.output_ids == together.output_ids
        assert alone.prompt_logprobs == [pytest.approx(told, abs=1e-4) for told in together.prompt_logprobs]


def test_a_step_behind_one_with_more_rows_than_are_recorded() -> None:
    harness = Harness(make_model("Llama"), overlap=True, max_num_seqs=8)
    harness.runner._sizes, harness.engine.recovers = ladder(2), False
    requests = [Request(f"r{i}", p, SamplingParams(20 if i < 2 else 8)) for i, p in enumerate(PROMPTS)]
    harness.run(requests)
    want = [generate_alone(harness.model, r.prompt_ids, greedy(r.params.max_new_tokens)) for r in requests]
    assert [r.output_ids for r in requests] == want and len(harness.captures) == 2 and harness.replays > 8


@pytest.mark.parametrize("way", ["copies", "loads"])
def test_blocks_are_copied_and_loaded_in_front_of_a_recorded_step(way: str) -> None:
    """Of a prompt that is forked, and of requests that gave way and had their keys saved."""
    options = dict(num_blocks=12, host_blocks=40) if way == "loads" else {}
    harness = Harness(make_model("Llama"), overlap=True, prefix_caching=False, **options)
    harness.engine.recovers = False
    harness.runner.warm_up()
    seen, fill = 0, harness.runner._inputs.fill

    def counted(batch: StepBatch, size: int) -> None:
        nonlocal seen
        seen += any(getattr(group, way) for group in batch.groups)
        fill(batch, size)

    harness.runner._inputs.fill = counted
    first = Request("first", PROMPTS[3], SamplingParams(20))
    made = [first]
    if way == "copies":
        made.append(Request("fork", PROMPTS[3], SamplingParams(20), fork_of=first))
    else:
        made += [Request(f"r{i}", PROMPTS[i], SamplingParams(20)) for i in (0, 1, 4)]
    harness.run(made)
    assert seen and [r.output_ids for r in made] == [
        generate_alone(harness.model, r.prompt_ids, greedy(20)) for r in made
    ]
