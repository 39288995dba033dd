"""Traces: our own files, Azure's and Mooncake's, generated ones, and the prompts that are made for them."""

import json

import numpy as np
import pytest

from hf_cb.arrivals import Arrival, Trace
from hf_cb.bench.replay.calls import make_calls
from hf_cb.bench.replay.formats import read_trace, shape
from hf_cb.bench.replay.generators import Lengths, generate
from hf_cb.errors import OptionError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 3]}

{"timestamp": 1000, "input_length": 600, "output_length": 2, "hash_ids": [4, 5]}
"""
OURS = """{"hf_cb_trace": 1, "hash_block": 16}
{"arrival": 3.5, "prompt_tokens": 20, "output_tokens": 3, "hash_ids": [0, 1], "options": {"priority": 2}}
{"arrival": 3.0, "output_tokens": 4, "prompt": [5, 6, 7]}
"""


@pytest.fixture
def read(tmp_path):
    def read(text: str, **options):
        path = tmp_path / "trace"
        path.write_text(text)
        return read_trace(path, **options)

    return read


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    return [(round(a.at, 6), a.prompt_tokens, a.output_tokens) for a in trace.arrivals]


def test_azure(read):
    assert rows(read(AZURE)) == [(0.0, 374, 44), (4.314579, 396, 109), (4.541877, 879, 1)]
    assert rows(read(AZURE_2024)) == [(0.0, 2162, 5), (0.007405, 2399, 6)]
    assert len(read(AZURE, limit=2).arrivals) == 2


def test_mooncake(read):
    trace = read(MOONCAKE)
    assert rows(trace) == [(0.0, 1030, 5), (1.0, 600, 2), (3.052, 1500, 7)]
    assert trace.hash_block == 512 and trace.arrivals[2].hash_ids == (0, 1, 3)


def test_ours_with_and_without_its_first_line(read):
    trace = read(OURS)
    assert rows(trace) == [(0.0, 0, 4), (0.5, 20, 3)]
    assert trace.arrivals[1].options == {"priority": 2} and trace.arrivals[0].prompt == [5, 6, 7]
    assert rows(read(OURS.split("\n", 1)[1])) == rows(trace)
    assert read("".join(trace.lines())).arrivals == trace.arrivals
    # a recording has short requests first: the first lines are not the first arrivals
    assert rows(read(OURS, limit=1)) == [(0.0, 0, 4)]


@pytest.mark.parametrize(
    ("text", "words"),
    {
        "": "is no trace that is known",
        "a,b\n1,2\n": "is no JSON",
        '{"prompt": "x"}\n': "is no trace that is known",
        "[1]\n": "no JSON object",
        '{"hf_cb_trace": 9}\n': "version 9",
        '{"hf_cb_trace": 1}\n': "no requests",
        '{"arrival": 0, "output_tokens": 1}': "line 1: prompt_tokens=None",
        '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}\n{"arrival": -1}': "line 2: arrival=-1",
        '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "speed": 1}': "'speed' is unknown",
        '{"arrival": 0, "prompt_tokens": 1, "output_tokens": true}': "output_tokens=True",
        '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "hash_ids": ["x"]}': "hash_ids",
        "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n": "line 2",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n": "line 2",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1," + "9" * 200_000: "field larger",
        '{"hf_cb_trace": 1, "hash_block": 0}\n{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}': "hash_block=0",
        '{"hf_cb_trace": 1, "hash_block": "x"}\n{"arrival": 0}': "hash_block='x'",
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}': "line 1: arrival=nan",
        '{"timestamp": 0, "input_length": 1e999, "output_length": 1}': "line 1",
        '{"timestamp": "soon", "input_length": 1, "output_length": 1}': "line 1",
    }.items(),
)
def test_what_is_wrong_is_named(read, text, words):
    with pytest.raises(OptionError, match=words):
        read(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(OptionError, match="none.jsonl cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_a_trace_is_shaped_to_what_a_machine_can_take(read):
    shaped = shape(read(MOONCAKE), speed=2.0, limit=2, max_len=603)
    assert rows(shaped.trace) == [(0.0, 598, 5), (0.5, 600, 2)] and shaped.clipped == 1
    long = Trace("long", (Arrival(0.0, 100, 900), Arrival(1.0, 900, 900), Arrival(2.0, 30, 30)))
    assert [r[1:] for r in rows(shape(long, max_len=200).trace)] == [(100, 100), (100, 100), (30, 30)]
    assert shape(long).fingerprint == shape(long, speed=1.0).fingerprint != shape(long, speed=2.0).fingerprint
    for options in ({"speed": 0.0}, {"max_len": 1}):
        with pytest.raises(OptionError, match=next(iter(options))):
            shape(long, **options)


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_prompts_share_what_their_blocks_share(read):
    first, other, second = make_calls(read(MOONCAKE), vocab_size=1000)
    assert [len(c.prompt) for c in (first, second, other)] == [1030, 1500, 600]
    assert 1024 <= shared(first.prompt, second.prompt) < 1030
    assert shared(first.prompt, other.prompt) < 5
    assert (second.at, second.output_tokens) == (3.052, 7)


def test_prompts_are_the_same_for_the_same_seed_and_have_no_special_tokens():
    trace = Trace("x", tuple(Arrival(i, 400, 1) for i in range(3)))
    tokenizer = type("Tokenizer", (), {"all_special_ids": [0, 1, 2]})
    prompts = [c.prompt for c in make_calls(trace, 8, seed=1, tokenizer=tokenizer)]
    assert prompts == [c.prompt for c in make_calls(trace, 8, seed=1, tokenizer=tokenizer)]
    assert prompts != [c.prompt for c in make_calls(trace, 8, seed=2, tokenizer=tokenizer)]
    assert prompts[0] != prompts[1] and {i for p in prompts for i in p} == {3, 4, 5, 6, 7}


def test_prompts_that_are_there_are_taken(read):
    calls = make_calls(read(OURS), vocab_size=100)
    assert calls[0].prompt == [5, 6, 7] and len(calls[1].prompt) == 20 and calls[1].options == {"priority": 2}
    with pytest.raises(OptionError, match="request 0"):
        make_calls(Trace("x", (Arrival(0.0, 0, 1, "a text without a tokenizer"),)), 100)


@pytest.mark.parametrize("kind", ["poisson", "bursty"])
def test_generated_arrivals_have_their_rate_and_spread(kind):
    n, rate = 4000, 5.0
    trace = generate(kind, rate, n, Lengths.parse("lognormal:100:0.5"), Lengths.parse("uniform:4:8"), 3)
    gaps = np.diff([a.at for a in trace.arrivals])
    variation = 1.0 if kind == "poisson" else 3.0
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.15) and trace.arrivals[0].at == 0.0
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.15)
    prompts = [a.prompt_tokens for a in trace.arrivals]
    assert np.median(prompts) == pytest.approx(100, rel=0.05)
    assert {a.output_tokens for a in trace.arrivals} == {4, 5, 6, 7, 8}
    again = generate(kind, rate, n, Lengths.parse("50"), Lengths.parse("uniform:4:8"), 3)
    assert [a.at for a in again.arrivals] == [a.at for a in trace.arrivals], "lengths leave the times as they are"
    assert {a.prompt_tokens for a in again.arrivals} == {50}


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "uniform:8:4", "uniform:4", "lognormal:100:0", "normal:1:2"])
def test_lengths_are_checked(text):
    with pytest.raises(OptionError, match="lengths"):
        Lengths.parse(text)


def test_generators_are_checked():
    one = Lengths.parse("1")
    for options, word in {
        ("even", 1.0, 1): "even",
        ("poisson", 0.0, 1): "rate",
        ("poisson", 1.0, 0): "requests",
    }.items():
        with pytest.raises(OptionError, match=word):
            generate(*options, one, one)
    with pytest.raises(OptionError, match="burstiness"):
        generate("bursty", 1.0, 1, one, one, burstiness=0.0)


def test_lines_are_json_and_leave_out_what_is_empty():
    header, line = Trace("x", (Arrival(0.25, 3, 4),)).lines()
    assert json.loads(header) == {"hf_cb_trace": 1, "hash_block": 16}
    assert json.loads(line) == {"arrival": 0.25, "prompt_tokens": 3, "output_tokens": 4}
