"""Every honoured option by its documented example: what `generate` answers, alone and among all the others."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import sampling_examples as examples
from option_cases import WAYS, generated_tokens, manager_of, options_of, prompt_of, told
from tiny_models import make_model
from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("patched")
NAMES = sorted(examples.ALL)
SINGLE = [n for n in NAMES if n not in ("num_return_sequences", "do_sample")]  # for `generate`, greedy
WITHOUT_EFFECT = {"max_time", "remove_invalid_values", "renormalize_logits", "skip_special_tokens"}  # on these tokens
WITHOUT_EFFECT |= {"output_logits", "output_scores"}


@functools.cache
def model() -> PreTrainedModel:
    return make_model(num_hidden_layers=2)


@functools.cache
def alone(do_sample: bool) -> dict[str, list[tuple[Any, ...]]]:
    with manager_of(model(), "native") as manager:
        return {n: told(manager.submit(prompt_of(n), **options_of(n, do_sample)).outputs()) for n in NAMES}


@functools.cache
def among_all(do_sample: bool, way: str) -> tuple[dict[str, list[tuple[Any, ...]]], int]:
    """Results by option, and how often somebody had to give way."""
    with manager_of(model(), way) as manager:
        with manager.pause():  # all begin together
            handles = {n: manager.submit(prompt_of(n), **options_of(n, do_sample)) for n in NAMES}
        results = {n: told(h.outputs()) for n, h in handles.items()}
        preemptions = sum(r.metrics.preemptions for h in handles.values() for r in h.mailbox.requests)
    manager.engine.check_idle()
    return results, preemptions


@pytest.mark.parametrize("name", SINGLE)
def test_greedy_is_generates(name: str) -> None:
    (found,) = alone(False)[name]
    assert found[3] is None
    assert found[0] == generated_tokens(model(), prompt_of(name), options_of(name, False))


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS)
def test_among_all_others_the_result_is_the_same(way: str, do_sample: bool) -> None:
    results, preemptions = among_all(do_sample, way)
    differing = [n for n in NAMES if results[n] != alone(do_sample)[n]]
    assert not differing
    assert preemptions > 0, "the cache was meant to be too small for all"


def test_the_examples_matter() -> None:
    """Each changes the greedy or the sampled answer; else the tests above could not fail."""
    same = set()
    with manager_of(model(), "native") as manager:
        for name in NAMES:
            for do_sample in (False, True):
                base = dict(max_new_tokens=10, do_sample=do_sample, seed=11, eos_token_id=-1)
                if "ignore_eos" in examples.ALL[name] or name.startswith("min_"):
                    base |= {k: v for k, v in examples.ALL[name].items() if k == "eos_token_id"}
                plain = told(manager.submit(prompt_of(name), **base).outputs())
                if alone(do_sample)[name][0][0] != plain[0][0]:
                    break
            else:
                same.add(name)
    assert same == WITHOUT_EFFECT


def test_every_honoured_option_has_an_example() -> None:
    from hf_cb.options import results as result_options
    from hf_cb.options.fields import HONOURED
    from hf_cb.options.own import OwnOptions
    from hf_cb.options.recipe import _PER_REQUEST

    assert set(examples.CONFIG) == HONOURED
    own = {*_PER_REQUEST, *OwnOptions.__dataclass_fields__} - {*result_options.NAMES}  # which tests/results is about
    assert set(examples.ARGUMENTS) | set(examples.OWN) == own
