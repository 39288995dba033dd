"""Playing a trace: against a scripted engine, and against hf_cb on a tiny model."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from tiny_models import make_model

from hf_cb.arrivals import Arrival, Trace
from hf_cb.bench.replay.calls import make_calls
from hf_cb.bench.replay.play import play
from hf_cb.bench.replay.turn import Turn
from hf_cb.config import EngineConfig
from hf_cb.errors import OptionError, QueueFullError

AT = [0.0, 0.01, 0.03]
CALLS = make_calls(Trace("x", tuple(Arrival(at, 10 + i, 3 + i) for i, at in enumerate(AT))), 100)


class Scripted:
    """Gives each request a life of known times after it was submitted."""

    def __init__(self, config: EngineConfig, log: list[str]) -> None:
        self.config, self.log, self.submitted = config, log, []

    def stats(self):
        return SimpleNamespace(steps=len(self.submitted))

    def reset_prefix_cache(self) -> None:
        self.log.append("reset")

    def submit(self, prompt, **options):
        self.submitted.append((prompt, options))
        now = time.perf_counter()
        if options.get("priority") == 7:
            raise QueueFullError("full")
        if options.get("priority") == 8:
            raise OptionError("no such option")
        n = options["max_new_tokens"] - (options.get("priority") == 9)
        output = SimpleNamespace(
            created_time=now,
            lifespan=(now + 1.0, now + 2.0 + n),
            timestamps=[now + 2.0 + i for i in range(n)],
            generated_tokens=[1] * n,
            metrics=SimpleNamespace(cached_tokens=4, preemptions=1),
            finish_reason="timeout" if options.get("priority") == 10 else "length",
            error=None,
        )
        return SimpleNamespace(outputs=lambda: [output])


@pytest.fixture
def played():
    """Plays calls against scripted engines; returns turns, engines and what happened."""

    def run(calls, names=("A", "B"), repeat=1):
        log, engines = [], []

        @contextmanager
        def opener(config):
            engines.append(Scripted(config, log))
            yield engines[-1]

        configs = {name: EngineConfig(max_num_seqs=i + 1) for i, name in enumerate(names)}
        turns = play(None, configs, calls, repeat, lambda turn: log.append(turn.setting), opener)
        return turns, engines, log

    return run


def test_settings_take_turns_backwards_every_other_time(played):
    turns, engines, log = played(CALLS, repeat=3)
    assert [(t.setting, t.round) for t in turns] == [("A", 0), ("B", 0), ("B", 1), ("A", 1), ("A", 2), ("B", 2)]
    assert [e.config.max_num_seqs for e in engines] == [1, 2, 2, 1, 1, 2], "a fresh manager each"
    assert log[:4] == ["reset", "A", "reset", "B"], "the warm-up's prefixes are forgotten before the clock runs"


def test_times_are_counted_from_when_a_request_was_due(played):
    (turn,), _, _ = played(CALLS, names=["A"])
    for served, call in zip(turn.requests, CALLS, strict=True):
        assert served.due == call.at and served.late_s >= 0
        assert served.queue_s == pytest.approx(1.0 + served.late_s)
        assert served.prefill_s == pytest.approx(1.0) and served.ttft_s == pytest.approx(2.0 + served.late_s)
        assert served.gaps == pytest.approx([1.0] * (call.output_tokens - 1))
        assert served.e2e_s == pytest.approx(2.0 + call.output_tokens + served.late_s)
    assert turn.tokens == 3 + 4 + 5 and turn.seconds >= AT[-1]


def test_lengths_are_forced_and_nothing_else_is_sampled(played):
    calls = make_calls(Trace("x", (Arrival(0.0, 5, 9, options={"eos_token_id": 3, "do_sample": True}),)), 100)
    _, (engine,), _ = played(calls, names=["A"])
    prompt, options = engine.submitted[-1]
    assert len(prompt) == 5 and options["max_new_tokens"] == 9 and options["eos_token_id"] == -1
    assert options["do_sample"] is True, "an option of the trace is kept"


def test_what_was_not_served_says_why(played):
    trace = Trace("x", tuple(Arrival(0.0, 5, 3, options={"priority": p}) for p in (7, 8, 9, 10, 0)))
    (turn,), _, _ = played(make_calls(trace, 100), names=["A"])
    assert [r.outcome for r in turn.requests] == ["rejected", "error", "error", "timeout", "done"]
    assert "full" in turn.requests[0].message and "no such option" in turn.requests[1].message
    assert turn.requests[2].message == "2 tokens instead of 3 (length)"
    again = Turn.from_dict(turn.as_dict())
    assert [r.outcome for r in again.requests] == [r.outcome for r in turn.requests]
    assert again.requests[4].gaps == pytest.approx(turn.requests[4].gaps, abs=1e-5)


def test_hf_cb_makes_the_tokens_that_were_asked_for():
    model = make_model("Llama")
    configs = {"A": EngineConfig(), "B": EngineConfig(max_num_seqs=1)}
    turns = play(model, configs, CALLS, repeat=2)
    assert [t.setting for t in turns] == ["A", "B", "B", "A"]
    for turn in turns:
        assert [r.tokens for r in turn.requests] == [3, 4, 5] and all(r.done for r in turn.requests)
        assert all(0 < r.ttft_s < r.e2e_s and r.queue_s < r.ttft_s for r in turn.requests)
        assert turn.steps >= 5
    assert not hasattr(model, "generate_batch") or "hf_cb" not in type(model).generate_batch.__module__


def test_equal_blocks_come_from_the_prefix_cache():
    trace = Trace("x", tuple(Arrival(0.05 * i, 40, 2, hash_ids=(0, 1, 2 + i)) for i in range(3)))
    model = make_model("Llama")
    cached, alone = (
        play(model, {"A": EngineConfig(block_size=16, prefix_caching=on)}, make_calls(trace, 100))
        for on in (True, False)
    )
    assert sum(r.cached_tokens for r in cached[0].requests) >= 32, "at least one came after another had ended"
    assert sum(r.cached_tokens for r in alone[0].requests) == 0
