"""Processors with a state, the caller's and transformers' own: asked once for each token and in order."""

from __future__ import annotations

import pytest
import torch
from fake_runner import make_engine
from option_cases import PROMPT, generated_tokens, manager_of
from running import run_all
from tiny_models import make_model, make_prompts
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

from hf_cb import OptionError
from hf_cb.core import Request
from hf_cb.options import processors
from hf_cb.options.recipe import make_recipe

SYNTH_ID = SynthIDTextWatermarkingConfig(keys=[11, 22, 33], ngram_len=3, context_history_size=8)


class Diary:
    """Remembers the lengths that it was asked at, and forbids what it has seen chosen."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == 1
        self.lengths.append(input_ids.shape[1])
        self.seen.append(int(input_ids[0, -1]))
        return scores.index_fill(1, torch.tensor(self.seen), float("-inf"))


STATEFUL = {
    "diary": lambda: dict(logits_processor=[Diary()]),
    "guidance": lambda: dict(guidance_scale=2.5),
    "negative prompt": lambda: dict(guidance_scale=2.5, negative_prompt_ids=[[4, 5, 6]]),
    "guidance without a cache": lambda: dict(guidance_scale=2.5, use_cache=False),
    "synth id": lambda: dict(watermarking_config=SYNTH_ID),
}


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("way", ["native", "overlap"])
@pytest.mark.parametrize("name", STATEFUL)
def test_giving_way_does_not_disturb_a_state(shared_llama, name: str, way: str) -> None:
    prompts = make_prompts([9, 5, 11, 7])
    base = dict(max_new_tokens=14, do_sample=False, eos_token_id=-1)
    with manager_of(shared_llama, way, num_blocks=16) as manager:
        with manager.pause():
            own = [base | STATEFUL[name]() for _ in prompts]
            handles = [manager.submit(p, **o) for p, o in zip(prompts, own, strict=True)]
        results = [handle.result() for handle in handles]
    assert sum(r.metrics.preemptions for r in results) > 0
    for prompt, options, result in zip(prompts, own, results, strict=True):
        assert result.generated_tokens == generated_tokens(shared_llama, prompt, base | STATEFUL[name]())
        if name == "diary":
            assert options["logits_processor"][0].lengths == [len(prompt) + i for i in range(14)]


@pytest.mark.usefixtures("patched")
def test_guidance_beside_lengths_that_change_the_rotary_embedding() -> None:
    """The model's own forward on the negative prompt writes to its buffers; steps do not read them."""
    scaling = dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0)
    model = make_model(num_hidden_layers=2, max_position_embeddings=16, rope_parameters=scaling)
    base = dict(max_new_tokens=12, do_sample=False, eos_token_id=-1)
    prompts = make_prompts([4, 14, 9, 13])
    options = [base | (dict(guidance_scale=2.0) if i % 2 else {}) for i in range(4)]
    with manager_of(model, "native", max_model_len=64) as manager:
        handles = [manager.submit(p, **o) for p, o in zip(prompts, options, strict=True)]
        results = [h.result().generated_tokens for h in handles]
    for prompt, given, result in zip(prompts, options, results, strict=True):
        fresh = make_model(num_hidden_layers=2, max_position_embeddings=16, rope_parameters=scaling)
        assert result == generated_tokens(fresh, prompt, given)


class Guess:
    """Drafts that are sometimes right: a runner counts up."""

    def propose(self, request: Request, room: int) -> list[int]:
        last = request.token_ids[-1]
        return [last + 1, last + 2, 7][:room]


def test_drafts_leave_a_state_alone_and_penalties_see_them(llama) -> None:
    """A processor with a state gets no drafts; penalties do, and their counts hold what was accepted alone."""
    penalties = dict(frequency_penalty=3.0, repetition_penalty=1.5, logit_bias={30: 2.5, 8: 2.0})
    given = dict(max_new_tokens=12, do_sample=False, eos_token_id=-1)

    def run(drafts: object, **options) -> tuple[Request, int]:
        engine = make_engine(drafts=drafts) if drafts else make_engine()
        recipe = make_recipe(llama, None, given | options, tokenizer=None, default_length=40)
        request = Request("r", [3, 5, 6], recipe.for_prompt([3, 5, 6]))
        run_all(engine, [request])
        return request, engine.num_steps

    plain, _ = run(None, **penalties)
    drafted, steps = run(Guess(), **penalties)
    assert drafted.output_ids == plain.output_ids and steps < 12
    diary = Diary()
    kept, steps = run(Guess(), logits_processor=[diary])
    assert steps == 12 and diary.lengths == list(range(3, 15)) and diary.seen == [6, *kept.output_ids[:-1]]


def test_watermarks_share_their_table_and_nothing_else(llama) -> None:
    options = dict(watermarking_config=WatermarkingConfig(bias=3.0), max_new_tokens=4)
    recipes = [make_recipe(llama, None, options, tokenizer=None, default_length=40) for _ in range(2)]
    one, two = (recipe.for_prompt(PROMPT).process[-1] for recipe in recipes)
    assert one.fixed_table is two.fixed_table and one.rng is not two.rng
    other = (
        make_recipe(
            llama,
            None,
            dict(watermarking_config=WatermarkingConfig(hashing_key=3)),
            **dict(tokenizer=None, default_length=40),
        )
        .for_prompt(PROMPT)
        .process[-1]
    )
    assert other.fixed_table is not one.fixed_table


def test_guidance_is_refused_where_the_model_is_spread(llama, monkeypatch) -> None:
    """Its forward would be on one rank alone, and wait for the others for ever."""
    monkeypatch.setattr(processors, "tp_group", lambda model: object())
    with pytest.raises(OptionError, match="guidance_scale=2.0.*tensor-parallel"):
        make_recipe(llama, None, dict(guidance_scale=2.0), tokenizer=None, default_length=40)
