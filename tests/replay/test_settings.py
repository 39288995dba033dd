"""Settings from the command line, and what must not differ between them."""

import json
from pathlib import Path

import pytest

from hf_cb.bench.replay.settings import Setting, as_json, check_comparable, parse_options, sweep
from hf_cb.config import EngineConfig
from hf_cb.errors import OptionError


def test_values_have_their_types(tmp_path):
    found = parse_options("prefill_chunk=128, overlap=false,kv_budget=2GiB,block_size=auto,queue_x=0.5,policy=fifo")
    assert found == {
        "prefill_chunk": 128,
        "overlap": False,
        "kv_budget": "2GiB",
        "block_size": None,
        "queue_x": 0.5,
        "policy": "fifo",
    }
    assert parse_options("") == {}
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"max_num_seqs": 4}))
    assert parse_options(str(file)) == {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("text", "words"),
    {
        "prefill_chunk": "must be key=value",
        "prefill_chunk=1,prefill_chunk=2": "given twice",
        "dtype=float16": "the same for all settings",
        "model=x": "the same for all settings",
        "queue_wait=1": "queue_wait",
        "none.json": "cannot be read",
    }.items(),
)
def test_what_is_wrong_is_named(text, words):
    with pytest.raises(OptionError, match=words):
        parse_options(text)


def test_a_sweep_is_a_setting_for_each_value():
    found = sweep("prefill_chunk=64,none", {"max_num_seqs": 4})
    assert found == [
        Setting("prefill_chunk=64", {"max_num_seqs": 4, "prefill_chunk": 64}),
        Setting("prefill_chunk=none", {"max_num_seqs": 4, "prefill_chunk": None}),
    ]
    for text in ("prefill_chunk", "prefill_chunk=64", "prefill_chunk=64,64", "=1,2"):
        with pytest.raises(OptionError, match="two different values"):
            sweep(text, {})


@pytest.mark.parametrize(
    "held", ["kv_dtype=int8", "max_model_len=64", "num_threads=1", "seed=3", "return_logprobs=true"]
)
def test_what_is_held_fixed_must_not_differ(held):
    options = parse_options(held)
    with pytest.raises(OptionError, match=f"must not differ.*{next(iter(options))}"):
        check_comparable([Setting("A"), Setting("B", options)])
    both = check_comparable([Setting("A", options), Setting("B", options | {"max_num_seqs": 1})])
    assert both["B"].max_num_seqs == 1


def test_wrong_options_are_named_with_their_setting():
    for options, words in {
        "num_threats=1": "B: Unknown option 'num_threats'",
        "max_num_seqs=0": "B: max_num_seqs",
    }.items():
        with pytest.raises(OptionError, match=words):
            check_comparable([Setting("A"), Setting("B", parse_options(options))])
    with pytest.raises(OptionError, match="Two settings are called 'A'"):
        check_comparable([Setting("A"), Setting("A")])


def test_settings_are_shown_as_they_were_given():
    assert str(Setting("A")) == "defaults"
    assert str(Setting("A", parse_options("overlap=true,kv_budget=none"))) == "overlap=true,kv_budget=none"
    config = EngineConfig()
    config.policy = Path("somebody's own")
    assert as_json(config)["policy"] == repr(config.policy)
