"""Intervals, verdicts and recommendations, on turns whose truth is known."""

import math

import numpy as np
import pytest
from synthetic import make_turns

from hf_cb.bench.replay.figures import compare, describe
from hf_cb.bench.replay.intervals import draw_requests, interval, percentiles
from hf_cb.bench.replay.slo import Slo, value_of
from hf_cb.bench.replay.turn import Served, Turn
from hf_cb.bench.replay.verdict import NONE, Pairs, overall, recommend, row_verdict
from hf_cb.errors import OptionError


@pytest.mark.parametrize("percent", [0.0, 1.0, 50.0, 95.0, 99.0, 100.0])
def test_percentiles_of_weighted_requests_are_numpys(percent):
    random = np.random.default_rng(3)
    values, owners = random.integers(0, 30, 200).astype(float), random.integers(0, 25, 200)
    counts = draw_requests(25, draws=20)
    found = percentiles(values, owners, counts, [percent])[:, 0]
    for row, weights in zip(found, counts, strict=True):
        assert row == np.quantile(values, percent / 100, weights=weights[owners], method="inverted_cdf")


def test_a_draw_without_values_has_no_percentile():
    counts = np.array([[1, 1], [2, 0], [0, 2]])
    assert np.isnan(percentiles([5.0], [1], counts, [50])[:, 0]).tolist() == [False, True, False]
    assert np.isnan(percentiles([], [], counts, [50])).all()


def test_intervals_have_what_differs_between_rounds_in_them():
    steady = interval(np.array([[1.0], [1.0], [1.0]]), 0.95, requests_too=False)
    assert (steady.value, steady.low, steady.high) == (1.0, 1.0, 1.0)
    uneven = interval(np.exp([[-0.1], [0.0], [0.1]]), 0.95, requests_too=False)
    half = 4.303 * 0.1 / 3**0.5  # Student's t with two degrees of freedom, of the logarithms
    assert uneven.low == pytest.approx(math.exp(-half), rel=0.02) and uneven.high == pytest.approx(
        math.exp(half), rel=0.02
    )
    assert interval(np.array([[1.0]]), 0.95, requests_too=False).low is None, "one round tells nothing of the rounds"


def test_identical_settings_differ_as_seldom_as_the_confidence_says():
    seeds, wrong = 60, 0
    for seed in range(seeds):
        a, b = make_turns("A", seed), make_turns("BB", seed)
        wrong += overall(compare(a, b), "A", "B") != NONE
    assert wrong <= 7, "5 % are 3 of 60; 8 or more happen once in a hundred times"


def test_intervals_hold_the_truth_as_often_as_they_say():
    seeds, held = 60, 0
    for seed in range(seeds):
        (row,) = (r for r in compare(make_turns("A", seed), make_turns("BB", seed, 1.2)) if r.name == "ttft_p50")
        held += row.change.low <= 0.2 <= row.change.high
    assert held >= 54


def test_a_slower_setting_is_found_and_by_how_much():
    a, b = make_turns("A", 1), make_turns("BB", 1, slower=2.0)
    rows = {row.name: row for row in compare(a, b)}
    assert all(row.better == "a" for row in rows.values())
    low, high = rows["ttft_p50"].faster_by
    assert 0.3 < low < 1.0 < high, "100 % faster, within its interval"
    assert rows["throughput"].change.value == pytest.approx(-0.5, abs=0.1)
    assert row_verdict(rows["e2e_p50"], "A", "B").startswith("A is faster, 1.")
    slightly = compare(a, make_turns("BB", 1, slower=1.3, drift=0.01))
    assert all(
        row_verdict(r, "A", "B").startswith(("A is faster, by ", "A does more, by ")) for r in slightly if r.better
    )
    assert overall(list(rows.values()), "A", "B").startswith("A is better in TTFT p50")
    swapped = {row.name: row for row in compare(b, a)}
    assert all(row.better == "b" for row in swapped.values())
    assert swapped["ttft_p50"].faster_by == pytest.approx((low, high), rel=0.1)


def test_one_round_gives_no_verdict():
    turns = {"A": make_turns("A", 1, rounds=1), "B": make_turns("BB", 1, 9.0, rounds=1)}
    rows = compare(turns["A"], turns["B"])
    assert len(rows) == 5 and all(row.better is None and row.change.low is None for row in rows)
    assert rows[0].change.value > 5, "what was seen is told all the same"
    assert row_verdict(rows[0], "A", "B") == "one round does not tell"
    assert overall(rows, "A", "B").startswith("one round does not tell")
    for slo in (None, Slo.parse("ttft=99s")):
        found = recommended(turns, slo)
        assert found.setting is None and "one round does not tell" in found.evidence[-1]


def test_only_requests_that_both_served_are_compared():
    a, b = make_turns("A", 1, drift=0, noise=0), make_turns("BB", 1, drift=0, noise=0)
    for turn in b:  # it rejects all that take long: what is left looks fast
        for i, request in enumerate(turn.requests):
            if request.ttft_s > 0.4:
                turn.requests[i] = Served(request.due, "rejected")
    rows = {row.name: row for row in compare(a, b)}
    assert rows["ttft_p95"].a == rows["ttft_p95"].b and rows["ttft_p95"].better is None
    figures = describe(b)
    assert figures.counts["rejected"] > 0 and any("rejected" in w for w in figures.warnings)


def test_nothing_served_is_nothing_to_compare():
    none = [Turn("A", i, 1.0, [Served(0.0, "rejected")]) for i in range(2)]
    assert compare(none, none) == []
    assert overall([], "A", "B").startswith("nothing to compare")
    assert math.isnan(describe(none).latency["ttft"]["p50"].value)


def test_a_mean_that_hides_a_tail_is_told():
    turns = make_turns("A", 0, n=200, noise=0.0)
    assert not [w for w in describe(turns).warnings if "ttft" in w and "tail" in w]
    for turn in turns:
        for request in turn.requests[:4]:
            request.ttft_s = 60.0
    assert [w for w in describe(turns).warnings if w.startswith("the mean ttft of")]


def test_an_slo_is_read_and_kept():
    slo = Slo.parse("ttft=500ms, itl_p95=0.05s,e2e=10s", 0.8)
    assert slo.limits == {"ttft": 0.5, "itl_p95": 0.05, "e2e": 10.0}
    good = Served(0.0, "done", ttft_s=0.5, e2e_s=2.0, gaps=[0.01] * 19 + [9.0], tokens=21)
    assert slo.met_by(good), "one gap in twenty may be longer"
    assert value_of(good, "itl_max") == 9.0 and value_of(good, "itl") == pytest.approx((0.19 + 9) / 20)
    assert not slo.met_by(Served(0.0, "rejected"))
    assert slo.met_by(Served(0.0, "done", ttft_s=0.1, e2e_s=0.1, tokens=1)), "one token has no gaps"
    for text, word in {
        "ttft": "ttft=500ms",
        "ttft=500": "a term and a time",
        "speed=1s": "the terms are",
        "ttft_p95=1s": "--slo-share",
        "ttft=0ms": "positive",
        "ttft=1.2.3s": "positive",
    }.items():
        with pytest.raises(OptionError, match=word):
            Slo.parse(text)


def recommended(turns: dict, slo: Slo | None = None):
    return recommend(Pairs(turns, slo), {name: describe(found, slo) for name, found in turns.items()})


def test_a_setting_that_meets_the_slo_goes_before_one_that_does_more():
    fast = make_turns("A", 1)
    busy = make_turns("BB", 1, slower=3.0)
    for turn in busy:
        turn.seconds /= 9  # three times the throughput
    assert recommended({"fast": fast, "busy": busy}, Slo.parse("ttft=2s", 0.9)).setting == "fast"
    loose = recommended({"fast": fast, "busy": busy}, Slo.parse("ttft=60s", 0.9))
    assert loose.setting == "busy" and any("throughput: busy does more" in line for line in loose.evidence)
    strict = recommended({"fast": fast, "busy": busy}, Slo.parse("ttft=1ms", 0.9))
    assert all("does not meet" in line for line in strict.evidence[:2])


def test_a_trade_off_is_told_and_not_decided():
    quick, smooth = make_turns("A", 1), make_turns("BB", 1)
    for turn in quick:
        for request in turn.requests:
            request.gaps = [3 * gap for gap in request.gaps]
    for turn in smooth:
        for request in turn.requests:
            request.ttft_s *= 3
    found = recommended({"quick": quick, "smooth": smooth})
    assert found.setting is None and "--slo" in found.evidence[-1]
    assert any(line.startswith("TTFT p50: quick is faster") for line in found.evidence)
    assert any(line.startswith("ITL p95: smooth is faster") for line in found.evidence)


def test_the_best_in_everything_is_recommended_and_equals_are_not():
    turns = {"one": make_turns("A", 1), "two": make_turns("BB", 2, 2.0), "three": make_turns("CCC", 3, 3.0)}
    found = recommended(turns)
    assert found.setting == "one" and any("than three" in line for line in found.evidence)
    assert recommended({"one": make_turns("A", 1), "two": make_turns("BB", 2)}).setting is None
