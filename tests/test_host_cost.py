"""What a step costs the host is printed, for every kind of step."""

from __future__ import annotations

import pytest

from hf_cb.bench import host_cost


@pytest.mark.parametrize("more", [[], ["--streams", "--device-ms", "1"], ["--wall"]])
def test_a_line_for_each_kind_and_number_of_rows(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    kinds = "all" if not more else "greedy"
    assert host_cost.main(["--rows", "1,3", "--contexts", "32", "--steps", "5", "--kinds", kinds, *more]) == 0
    table = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()]
    head, _, *lines = [[word.strip() for word in line] for line in table]
    wanted = [(k, r) for k in (host_cost.KINDS if kinds == "all" else ["greedy"]) for r in ("1", "3")]
    assert [(line[0], line[1]) for line in lines] == [(k, r) for k, r in wanted if (k, r) != ("mixed", "1")]
    assert all(len(line) == len(head) and float(line[-1]) > 0 for line in lines)
