"""A trace for Perfetto and a picture, of scripted traffic: what is in them, and what happens where they cannot be."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clocked import Clocked

from hf_cb.errors import HfCbError, OptionError
from hf_cb.metrics.lives import Span, lives_of
from hf_cb.metrics.perfetto import ENGINE, PHASES, REQUESTS, events, write_perfetto
from hf_cb.metrics.timeline import plot_timeline


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    """Some wait, some are cut into pieces, one gives way."""
    c = Clocked(monkeypatch, num_blocks=14, block_size=4, max_num_seqs=3, max_batch_tokens=12)
    for i in range(6):
        c.submit(f"r{i}", [100 * i + j for j in range(5 + 3 * i)], 12)
        c.step(2)
    c.finish()
    assert c.engine.scheduler.preemptions > 0
    return c


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Files larger than `size` bytes cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_life_in_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Clocked(monkeypatch, max_num_seqs=1, max_batch_tokens=4)
    c.submit("first", 2, 1)
    c.submit("r", 6, 3)
    c.finish()
    began = c.engine.records[0].started
    (life,) = [life for life in lives_of(list(c.engine.records)) if life.request_id == "r"]
    spans = [s._replace(begin=round(s.begin - began, 3), end=round(s.end - began, 3)) for s in life.spans]
    assert spans == [
        Span("queued", 0.0, 0.012),
        Span("prefill", 0.012, 0.026, 4, 1),
        Span("prefill", 0.026, 0.038, 2, 2),
        Span("decode", 0.038, 0.049, 1, 3),
        Span("decode", 0.049, 0.06, 1, 4),
    ]
    assert (life.first_token, life.reason) == (pytest.approx(began + 0.038), "length")
    forgotten = lives_of(list(c.engine.records)[3:])
    assert [s.kind for s in forgotten[0].spans] == ["decode", "decode"]


def test_two_requests_of_one_name_are_two_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Clocked(monkeypatch)
    r = c.submit("r", 3, 50)
    c.step(3)
    c.engine.cancel(r)
    c.now += 1
    c.submit("r", 3, 2)
    c.finish()
    first, second = lives_of(list(c.engine.records))
    assert (first.reason, second.reason) == (None, "length")
    assert [span.kind for span in second.spans] == ["queued", "prefill", "decode"]


def test_lives_hold_every_token_and_every_preemption(busy: Clocked) -> None:
    records = list(busy.engine.records)
    lives = lives_of(records)
    assert [life.request_id for life in lives] == [f"r{i}" for i in range(6)]
    assert all(life.reason == "length" for life in lives)
    spans = [span for life in lives for span in life.spans]
    assert sum(span.tokens for span in spans) == sum(r.query_tokens for r in records)
    assert sum(span.kind == "preempted" for span in spans) == busy.engine.scheduler.preemptions
    for life in lives:
        for one, next_one in zip(life.spans, life.spans[1:], strict=False):
            assert one.begin <= one.end <= next_one.begin


def test_the_budgets_are_in_every_record(busy: Clocked) -> None:
    for r in busy.engine.records:
        assert sum(share.num_tokens for share in r.shares) == r.query_tokens <= r.tokens_allowed == 12
        assert sum(s.num_tokens for s in r.shares if s.decoding) == r.decode_tokens
        assert sum(share.new_tokens for share in r.shares) == r.sampled
        assert r.blocks_used <= r.blocks_allowed == 14
        assert r.requests <= r.running <= r.requests_allowed == 3
        assert r.share_of("nobody") is None
    assert {r.bound_by for r in busy.engine.records} >= {"blocks", "requests"}


def test_a_perfetto_trace(busy: Clocked, tmp_path: Path) -> None:
    records = list(busy.engine.records)
    write_perfetto(records, tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert names == {
        (ENGINE, PHASES): "phases",
        (ENGINE, 2): "steps",
        **{(REQUESTS, i + 1): f"r{i}" for i in range(6)},
    }
    slices: dict[Any, list[dict[str, Any]]] = {}
    for event in found:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
    assert slices.keys() == names.keys()
    for track in slices.values():  # on a track, slices follow each other
        track.sort(key=lambda e: (e["ts"], e["ts"] + e["dur"]))
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in zip(track, track[1:], strict=False))
    steps = slices[ENGINE, 2]
    assert [e["name"] for e in steps] == [f"step {r.step}" for r in records]
    assert steps[0]["args"]["tokens"] == f"{records[0].query_tokens} of 12"
    counters = {e["name"] for e in found if e["ph"] == "C"}
    assert counters == {"query tokens", "KV blocks", "requests"}
    assert {e["name"] for e in found if e["pid"] == REQUESTS and e["ph"] == "X"} == {
        "queued",
        "prefill",
        "decode",
        "preempted",
    }


def test_steps_that_overlap_have_two_tracks(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Clocked(monkeypatch, overlap=True)
    c.submit("r", 5, 6)
    c.finish()
    found = list(events(list(c.engine.records)))
    assert {e["tid"] for e in found if e["ph"] == "X" and e["name"].startswith("step")} == {2, 3}
    lives = lives_of(list(c.engine.records))
    assert all(a.end <= b.begin for a, b in zip(lives[0].spans, lives[0].spans[1:], strict=False))


@pytest.mark.parametrize("by", ["time", "steps"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(busy: Clocked, tmp_path: Path, by: Any, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    path = tmp_path / f"trace.{suffix}"
    plot_timeline(list(busy.engine.records), path, by=by, title="what happened")
    drawn = path.read_bytes()
    if suffix == "png":
        assert drawn.startswith(b"\x89PNG")
    else:
        text = drawn.decode()
        for word in ("what happened", "r5", "prefill", "preempted", "budget: 12", "all blocks: 14", "first token"):
            assert word in text, word


def test_no_picture_of_nothing_or_of_an_unknown_kind(busy: Clocked, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    with pytest.raises(OptionError, match="no steps"):
        plot_timeline([], tmp_path / "trace.png")
    with pytest.raises(OptionError, match="must end with one of"):
        plot_timeline(list(busy.engine.records), tmp_path / "trace.doc")
    with pytest.raises(OptionError, match='must be "time" or "steps"'):
        plot_timeline(list(busy.engine.records), tmp_path / "trace.png", by="weeks")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_file_and_nothing_else(busy: Clocked, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("before")
    with full_disk(1000), pytest.raises(HfCbError, match=r"trace.json cannot be written \([0-9,]+ bytes\): File too l"):
        write_perfetto(list(busy.engine.records), path)
    with pytest.raises(HfCbError, match="cannot be written"):
        write_perfetto(list(busy.engine.records), tmp_path / "nowhere" / "trace.json")
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    assert path.read_text() == "before"
    busy.submit("after", 5, 2)
    busy.finish()
    busy.engine.check_idle()
