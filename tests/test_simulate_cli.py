"""`hf-cb simulate`: what it prints, and what it says about files that it does not understand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hf_cb.cli import main

WORKED = """\
step  at  contents  tokens  requests  blocks  waiting  bound by
1     0   A1+B1     2/5     2/2       2/7     1        requests
2     1   A1+B1     2/5     2/2       2/7     1        requests  A ends
3     2   B1+C4     5/5     2/2       2/7     0        tokens
4     3   B1+C3     4/5     2/2       2/7     0        -         C's first token, B ends, C ends

request  arrival  started  first token  end  reason  gave way
A        before   before   before       2    length  0
B        before   before   before       4    length  0
C        0        2        4            4    length  0
"""


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.split("\n\n")[0].splitlines()[1:]]


def test_without_arguments_it_prints_the_worked_example(capsys) -> None:
    assert main(["simulate"]) == 0
    assert capsys.readouterr().out == WORKED


def test_the_worked_example_with_another_policy_and_other_budgets(capsys) -> None:
    assert main(["simulate", "--policy", "static"]) == 0
    assert [row[2] for row in table(capsys.readouterr().out)] == ["A1+B1", "A1+B1", "B1", "B1", "C5", "C2"]
    assert main(["simulate", "--max-batch-tokens", "4", "--max-num-seqs", "3", "--prefill-chunk", "2"]) == 0
    assert table(capsys.readouterr().out)[0][2:4] == ["A1+B1+C2", "4/4"]


@pytest.mark.parametrize("as_list", [True, False])
def test_a_file(as_list: bool, tmp_path: Path, capsys) -> None:
    requests = [
        {"prompt": 4, "output": 3, "priority": 1},
        {"prompt": 4, "output": 1, "arrival": 1, "name": "urgent", "deadline": 9, "user": "u"},
        {"prompt": 4, "output": 2, "arrival": 40.5},
    ]
    path = tmp_path / "requests.json"
    path.write_text(json.dumps(requests) if as_list else "\n".join(map(json.dumps, requests)))
    assert main(["simulate", str(path), "--policy", "priority", "--max-num-seqs", "1", "--block-size", "2"]) == 0
    said = capsys.readouterr().out
    assert [row[1:3] for row in table(said)] == [
        ["0", "A4"],
        ["1", "urgent4"],
        ["2", "A1"],
        ["3", "A1"],
        ["40.5", "C4"],
        ["41.5", "C1"],
    ]
    assert "A gives way" in said


def test_steps_that_take_time_and_a_policy_that_waits(tmp_path: Path, capsys) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": 100, "output": 2}\n{"prompt": 100, "output": 2, "arrival": 5}')
    options = ["--policy", "dynamic:2:0.5", "--step-time", "0.01:0.001:0.0001", "--json"]
    assert main(["simulate", str(path), *options]) == 0
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [s["contents"] for s in steps] == [{}, {"A": 100}, {"A": 1}, {"B": 100}, {"B": 1}]
    assert steps[0]["bound_by"] == "policy" and steps[0]["until"] == 0.5
    assert [round(s["until"] - s["at"], 6) for s in steps[1:3]] == [0.02, 0.011]
    assert steps[2]["ended"] == {"A": "length"}


def test_equal_beginnings_are_computed_once_unless_told_otherwise(tmp_path: Path, capsys) -> None:
    path = tmp_path / "requests.jsonl"
    one = '{"prompt": 70, "output": 1, "prefix": "system", "prefix_tokens": 64, "arrival": %d}'
    path.write_text(f"{one % 0}\n{one % 1}")
    assert main(["simulate", str(path)]) == 0
    assert [row[2] for row in table(capsys.readouterr().out)] == ["A70", "B6"]
    assert main(["simulate", str(path), "--no-prefix-caching"]) == 0
    assert [row[2] for row in table(capsys.readouterr().out)] == ["A70", "B70"]


BAD = {
    "not json": ("hello", "neither a JSON list"),
    "nothing": ("[]", "no requests"),
    "no object": ("[7]", "Request 0.*7"),
    "unknown field": ('[{"prompt": 1, "output": 1, "color": 2}]', "'color'.*known are name, prompt"),
    "missing": ('[{"prompt": 1}]', "Request 0 has no output"),
    "type": ('[{"prompt": "long", "output": 1}]', "prompt is 'long'; wanted is a whole number from 1 to"),
    "least": ('[{"prompt": 1, "output": 0}]', "output is 0; wanted"),
    "not finite": ('[{"prompt": 1, "output": 1, "arrival": NaN}]', "arrival is nan; wanted is a number from 0 to"),
    "never": ('[{"prompt": 1, "output": 1, "arrival": Infinity}]', "arrival is inf; wanted"),
    "huge": ('[{"prompt": 1000000000000, "output": 1}]', "prompt is 1000000000000; wanted"),
    "flag": ('[{"prompt": 1, "output": 1, "running": 1}]', "running is 1; wanted is true or false"),
    "same names": ('[{"name": "A", "prompt": 1, "output": 1}, {"name": "A", "prompt": 1, "output": 1}]', "same name"),
    "running": ('[{"prompt": 9, "output": 1, "running": true}, {"prompt": 9, "output": 1, "running": true}]', "fewer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, tmp_path: Path, capsys) -> None:
    text, message = BAD[name]
    path = tmp_path / "requests.json"
    path.write_text(text)
    assert main(["simulate", str(path), "--max-num-seqs", "1"]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "first"], "'first'"),
        (["--step-time", "0"], "--step-time"),
        (["--step-time", "1:2:3:4"], "--step-time"),
        (["--num-blocks", "1", "--block-size", "2"], "Request A: .*need 2 KV blocks"),
        (["nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys) -> None:
    assert main(["simulate", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
