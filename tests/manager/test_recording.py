"""manager.record: what is written down of submissions."""

import io
import json

import pytest
from tiny_models import greedy, make_model, make_prompts

from hf_cb.bench.replay.calls import make_calls
from hf_cb.bench.replay.formats import read_trace
from hf_cb.config import EngineConfig
from hf_cb.errors import OptionError, PromptError, QueueFullError
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.manager.session import open_manager

OPTIONS = EngineConfig(block_size=4, num_blocks=64)
PROMPTS = make_prompts([40, 20, 3])
SAME_START = PROMPTS[0][:32] + [9, 9, 9]


@pytest.fixture
def manager(shared_llama):
    with open_manager(shared_llama, OPTIONS) as manager:
        yield manager


def submit(manager, prompt, tokens=3, **options):
    return manager.submit(prompt, greedy(tokens), **options)


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_recording_can_be_read_and_replayed(manager, tmp_path):
    file = tmp_path / "trace.jsonl"
    with manager.record(file):
        for i, prompt in enumerate([*PROMPTS, SAME_START]):
            submit(manager, prompt, 2 + i, priority=i).result()
    submit(manager, PROMPTS[2]).result()
    trace = read_trace(file)
    assert [(a.prompt_tokens, a.output_tokens) for a in trace.arrivals] == [(40, 2), (20, 3), (3, 4), (35, 5)]
    assert [a.options.get("priority", 0) for a in trace.arrivals] == [0, 1, 2, 3]
    assert trace.arrivals[0].at == 0 < trace.arrivals[1].at < trace.arrivals[3].at
    calls = make_calls(trace, vocab_size=1000)
    assert 32 <= shared(calls[0].prompt, calls[3].prompt) < 35, "two blocks of 16 were the same"
    assert shared(calls[0].prompt, calls[1].prompt) < 5


def test_what_prompts_said_is_not_kept_unless_asked_for(manager):
    for prompts, wanted in (("hashes", "hash_ids"), ("lengths", None), ("ids", "prompt")):
        kept = io.StringIO()
        with manager.record(kept, prompts=prompts):
            submit(manager, PROMPTS[1]).result()
        row = json.loads(kept.getvalue().splitlines()[1])
        assert {"hash_ids", "prompt"} & set(row) == ({wanted} if wanted else set())
        if prompts == "ids":
            assert row["prompt"] == PROMPTS[1]
        if prompts == "hashes":
            assert row["hash_ids"] == [0, 1], "numbers that say nothing but which are equal"


def test_without_a_file_it_is_kept(manager):
    recorder = manager.record()
    with pytest.raises(OptionError, match="being recorded already"):
        manager.record()
    handles = [submit(manager, prompt) for prompt in PROMPTS]
    manager.add_request(PROMPTS[0], max_new_tokens=5, eos_token_id=-1)
    assert manager.get_result(timeout=10) is not None
    for handle in handles:
        handle.result()
    recorder.stop()
    assert sorted(a.prompt_tokens for a in recorder.trace.arrivals) == [3, 20, 40, 40]
    with manager.record(io.StringIO()) as again, pytest.raises(OptionError, match="goes to a file"):
        _ = again.trace
    with pytest.raises(OptionError, match="prompts='text'"):
        manager.record(prompts="text")


def test_requests_that_go_on_are_written_when_it_stops(manager):
    recorder = manager.record()
    handle = submit(manager, PROMPTS[1], 200)
    next(iter(handle))
    recorder.stop()
    (arrival,) = recorder.trace.arrivals
    assert 1 <= arrival.output_tokens < 200
    handle.cancel()
    handle.outputs()
    assert len(recorder.trace.arrivals) == 1


def test_refused_requests_are_not_arrivals_and_rejected_ones_are():
    manager = ContinuousBatchingManager(
        make_model(), config=EngineConfig(num_blocks=64, block_size=4, max_queue_size=1)
    )
    recorder = manager.record()
    with pytest.raises(PromptError):
        submit(manager, [5] * 10_000)
    first = submit(manager, PROMPTS[2])
    with pytest.raises(QueueFullError):  # not started, so the first one waits
        submit(manager, PROMPTS[1], 7)
    manager.start()
    first.result()
    manager.stop()
    recorder.stop()
    assert [(a.prompt_tokens, a.output_tokens) for a in recorder.trace.arrivals] == [(3, 3), (20, 7)]


def test_a_file_that_cannot_be_written_ends_the_recording_alone(manager):
    class Full(io.StringIO):
        def write(self, text):
            if self.tell():
                raise OSError("no space left")
            return super().write(text)

    recorder = manager.record(Full())
    assert len(submit(manager, PROMPTS[1]).result().generated_tokens) == 3
    assert recorder.stopped
    recorder.stop()
    with manager.record():
        submit(manager, PROMPTS[1]).result()
