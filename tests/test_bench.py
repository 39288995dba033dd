"""The benchmark's parts: workloads, engines, rounds and figures."""

import time
from dataclasses import replace

import pytest
from tiny_models import VOCAB

import hf_cb
from hf_cb.bench import first_token, others
from hf_cb.bench.engines import HERE, Generate, HfCb, TransformersBatching, make_engines
from hf_cb.bench.measured import CannotRun, Measured
from hf_cb.bench.report import decode_steps, percentile, summarize, table
from hf_cb.bench.run import run_engines
from hf_cb.bench.workload import (
    BenchRequest,
    Workload,
    long_answers,
    long_prompts,
    mixed,
    poisson,
    shared,
    shipped_text,
    single,
)


def tokenizer(text: str, verbose: bool = True) -> dict[str, list[int]]:
    """A token a character."""
    return {"input_ids": [3 + ord(c) % (VOCAB - 3) for c in text]}


def few(max_new: tuple[int, ...] = (3, 5, 2)) -> Workload:
    lengths = mixed(tokenizer, n=len(max_new), prompt_mean=16, max_len=40, out_max=20)
    requests = [BenchRequest(r.prompt, n) for r, n in zip(lengths.requests, max_new, strict=True)]
    return Workload("few", requests)


class Fake:
    """Takes as long as it is told, and can lose tokens or raise."""

    def __init__(self, name: str, seconds: list[float], lost: int = 0, fails_at: int | None = None) -> None:
        self.name, self.seconds, self.lost, self.fails_at = name, seconds, lost, fails_at
        self.seen: list[Workload] = []

    def run(self, workload: Workload) -> Measured:
        if len(self.seen) == self.fails_at:
            raise RuntimeError("out of luck")
        self.seen.append(workload)
        problems = ["request 0: short"] if self.lost else []
        tokens = workload.output_tokens - self.lost
        return Measured(self.name, tokens, self.seconds[len(self.seen) - 1], [0.1], [0.2], problems)


def test_a_mixed_workload_is_the_same_every_time_and_keeps_its_bounds():
    load = mixed(tokenizer)
    assert load == mixed(tokenizer) and load != mixed(tokenizer, seed=1)
    assert len(load.requests) == 64
    assert all(16 <= len(r.prompt) <= 768 and 16 <= r.max_new <= 256 for r in load.requests)
    assert len({len(r.prompt) for r in load.requests}) > 20
    assert load.prompt_tokens == sum(len(r.prompt) for r in load.requests)
    assert 80_000 < len(shipped_text()) < 120_000


def test_prompts_leave_room_for_their_outputs():
    load = mixed(tokenizer, n=300, max_len=100, out_max=50)
    assert all(len(r.prompt) <= 50 and r.prompt for r in load.requests)
    (request,) = single(tokenizer, max_len=100, max_new=40).requests
    assert (len(request.prompt), request.max_new) == (60, 40)


def test_impossible_workloads_are_refused():
    for wrong in ({"n": 0}, {"out_min": 9, "out_max": 8}, {"max_len": 20}, {"prompt_mean": 0}):
        with pytest.raises(hf_cb.OptionError):
            mixed(tokenizer, **wrong)


def test_long_prompts_and_long_answers_start_at_different_places():
    long, short = long_prompts(tokenizer), long_answers(tokenizer, n=3)
    assert {(len(r.prompt), r.max_new) for r in long.requests} == {(2000, 20)}
    assert {(len(r.prompt), r.max_new) for r in short.requests} == {(20, 2000)}
    assert len({tuple(r.prompt[:20]) for r in long.requests}) == 16
    (cut,) = long_prompts(tokenizer, n=1, max_len=300).requests
    assert len(cut.prompt) == 280
    with pytest.raises(hf_cb.OptionError, match="no room"):
        long_answers(tokenizer, max_len=2000)


def test_a_shared_beginning():
    load = shared(tokenizer, n=5, prefix_len=100)
    assert len({tuple(r.prompt[:100]) for r in load.requests}) == 1
    assert len({tuple(r.prompt[100:]) for r in load.requests}) == 5
    assert {(len(r.prompt), r.max_new) for r in load.requests} == {(132, 64)}


def test_arrivals_are_the_same_every_time_and_as_many_a_second_as_asked():
    base = mixed(tokenizer, n=400)
    load = poisson(base, rate=8.0)
    assert load == poisson(base, rate=8.0) and load != poisson(base, rate=8.0, seed=1)
    times = [r.arrival for r in load.requests]
    assert times == sorted(times) and times[0] == 0.0
    assert 400 / 8 * 0.8 < times[-1] < 400 / 8 * 1.2
    assert base.at_once and not load.at_once and load.warm_up().at_once
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(hf_cb.OptionError, match="rate"):
            poisson(base, rate)


@pytest.mark.parametrize("engine", [HfCb, TransformersBatching])
def test_requests_can_arrive_later(llama, engine):
    load = few((3, 5))
    load.requests[1] = replace(load.requests[1], arrival=0.3)
    measured = engine(llama).run(load)
    assert measured.problems == [] and measured.seconds >= 0.3
    assert all(t > 0 for t in measured.ttft) and min(measured.itl) >= 0


def test_generate_takes_no_later_arrivals(llama):
    result = run_engines([Generate(llama)], poisson(few(), rate=100.0))
    assert list(result.unable) == ["generate"] and result.problems == []
    with pytest.raises(CannotRun):
        Generate(llama).run(poisson(few(), rate=100.0))


def test_options_reach_the_engines_that_know_them(llama):
    ours, theirs = make_engines(["hf_cb", "transformers"], llama, max_num_seqs=2, prefix_caching=False)
    assert isinstance(ours, HfCb) and isinstance(theirs, TransformersBatching)
    assert (ours.config.max_num_seqs, ours.config.prefix_caching) == (2, False)
    assert theirs._config(few()).allow_block_sharing is False
    assert ours.run(few()).problems == [] and theirs.run(few()).problems == []
    assert max(step.requests for step in ours.run(few((6, 6, 6))).steps) == 2


@pytest.mark.parametrize("engine", [HfCb, Generate, TransformersBatching])
def test_every_engine_makes_the_tokens_that_were_ordered(llama, engine):
    load = few()
    measured = engine(llama).run(load)
    assert measured.problems == []
    assert measured.output_tokens == load.output_tokens
    assert len(measured.ttft) == 3 and len(measured.itl) == load.output_tokens - 3
    assert all(0 < t <= measured.seconds for t in measured.ttft)
    assert bool(measured.steps) == (engine is HfCb)
    assert [len(ids) for ids in measured.tokens] == [3, 5, 2]


def test_generate_works_in_batches(llama):
    measured = Generate(llama, batch_size=2).run(few())
    assert measured.output_tokens == few().output_tokens
    assert measured.ttft[0] == measured.ttft[1] < measured.ttft[2], "the second batch waits for the first"


def test_transformers_own_batching_is_not_measured_through_hf_cb(llama, patched):
    with pytest.raises(hf_cb.OptionError, match="unpatch"):
        TransformersBatching(llama).run(few())


def test_hf_cb_is_off_after_its_run(llama):
    HfCb(llama).run(few())
    with pytest.raises(AttributeError):
        llama.stream_batch([[1, 2]])


def test_a_short_result_is_a_problem(llama):
    """With max_model_len=256, hf_cb cuts the second request short."""
    load = few((3, 9))
    load.requests[1] = replace(load.requests[1], prompt=[5] * 250)
    result = run_engines([HfCb(llama, max_model_len=256), Fake("generate", [1.0] * 2, lost=1)], load)
    assert result.problems == [  # the last token needs no position
        "hf_cb, round 1: request 1: 7 tokens instead of 9",
        "generate, round 1: request 0: short",
    ]


def test_engines_take_turns_and_ratios_are_of_rounds():
    ours, theirs = Fake("hf_cb", [9.0, 1.0, 2.0, 4.0]), Fake("generate", [9.0, 3.0, 4.0, 20.0])
    order: list[str] = []
    result = run_engines([ours, theirs], few(), repeat=3, on_run=lambda m: order.append(m.engine))
    assert order == ["hf_cb", "generate", "generate", "hf_cb", "hf_cb", "generate"]
    assert [w.name for w in ours.seen] == ["few warm-up", "few", "few", "few"]
    assert max(r.max_new for r in ours.seen[0].requests) <= 4
    assert result.tok_s("hf_cb") == few().output_tokens / 2.0
    assert result.ratio("hf_cb", "generate") == 3.0
    assert summarize(result)["ratios"] == {"hf_cb / generate": 3.0}


def test_other_programs_are_noticed(monkeypatch):
    busy, ours = iter([10.0, 16.0]), iter([3.0, 5.0])
    monkeypatch.setattr(others, "_busy", lambda: next(busy))
    monkeypatch.setattr(others, "_ours", lambda: next(ours))
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(others.time, "perf_counter", lambda: next(clock))
    assert others.OtherWork().cores() == 2.0


def test_our_own_work_is_not_another_programs():
    before = others._ours()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert others._ours() - before >= 0.08 and others._busy() > 0


def test_figures_of_a_busy_machine_come_with_a_word():
    result = run_engines([Fake("hf_cb", [1.0] * 2)], few())
    assert result.rounds["hf_cb"][0].others is not None
    result.rounds["hf_cb"][0].others = 0.05
    assert "quiet machine" not in table(summarize(result))
    result.rounds["hf_cb"][0].others = 1.25
    assert "up to 1.2 cores busy meanwhile: measure on a quiet machine" in table(summarize(result))


def test_an_engine_that_raises_does_not_end_the_others():
    bad, good = Fake("generate", [1.0] * 3, fails_at=2), Fake("hf_cb", [1.0] * 3)
    result = run_engines([bad, good], few(), repeat=2)
    assert result.failed == {"generate": "RuntimeError: out of luck"}
    assert (len(result.rounds["generate"]), len(result.rounds["hf_cb"])) == (1, 2)
    assert "PROBLEM generate failed: RuntimeError: out of luck" in table(summarize(result))


def test_an_engine_that_never_ran_is_only_a_problem():
    result = run_engines([Fake("generate", [], fails_at=0), Fake("hf_cb", [1.0] * 2)], few())
    summary = summarize(result)
    assert list(summary["engines"]) == ["hf_cb"] and summary["ratios"] == {}


def test_decode_steps_leave_prompts_out(llama):
    steps = HfCb(llama).run(few((60, 120, 120))).steps  # so long that all three run together for a while
    means = decode_steps(steps)
    assert means["full"]["requests"] == 3 and means["all"]["requests"] < 3
    assert means["all"]["steps"] < len(steps)
    parts = sum(means["all"][f"{name}_ms"] for name in ("plan", "build", "commit"))
    assert means["all"]["host_ms"] == pytest.approx(parts)
    assert decode_steps([s for s in steps if s.prefill_tokens]) == {}


def test_percentiles():
    values = [float(i) for i in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 95), percentile(values, 100)) == (50.0, 95.0, 100.0)
    assert percentile([7.0], 95) == 7.0 and percentile([], 50) is None


def test_engines_by_name(llama):
    assert [e.name for e in make_engines(HERE, llama)] == list(HERE)
    with pytest.raises(hf_cb.OptionError, match="--env vllm=PYTHON"):
        make_engines(["vllm"], llama)
    with pytest.raises(hf_cb.OptionError, match="warp"):
        make_engines(["warp"], llama)
    with pytest.raises(hf_cb.OptionError, match="blocks"):
        make_engines(["hf_cb"], llama, blocks=3)


def test_a_first_token_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(first_token, "__file__", "/no/such/file.py")
    with pytest.raises(RuntimeError, match="/no/such/file.py"):
        first_token.time_first_token({}, [1], {})


def test_sweep_of_a_few_architectures(tmp_path, capsys) -> None:
    from hf_cb.bench import sweep

    page = tmp_path / "models.md"
    assert sweep.main(["--only", "llama,bloom,t5gemma", "--longest", "20", "--page", str(page)]) == 0
    assert "llama                    same     paged" in capsys.readouterr().out
    assert "| bloom | dense | paged: " in page.read_text() and "| llama | paged |  |" in page.read_text()
