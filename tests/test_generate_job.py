"""`hf-cb generate --input --output`: whatever happens on the way, the file that comes out is the same."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from byte_models import byte_model, byte_tokenizer

from hf_cb.cli import main
from hf_cb.cli.job_lines import Line, read_task
from hf_cb.cli.job_output import open_output
from hf_cb.errors import HfCbError

SETTINGS = ["--max-new-tokens", "12", "--device", "cpu", "--max-num-seqs", "4", "--engine", "num_blocks=64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    byte_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def lines(count: int = 24) -> list[dict]:
    """Of every kind, greedy and sampled, a few of them bad."""
    kinds = [
        {"prompt": "some text"},
        {"messages": [{"role": "user", "content": "hello"}], "temperature": 3.0},
        {"prompt_ids": [5, 6, 7], "max_new_tokens": 30},
        {"prompt": "x" * 600},  # too long
        {"prompt": "several", "num_return_sequences": 2, "temperature": 2.0},
        {
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 2.0, "n": 2},
        },
    ]
    return [{"custom_id": f"line {i}"} | kinds[i % len(kinds)] for i in range(count)]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def job(folder: str, source: Path, target: Path, *more: str) -> list[str]:
    return ["generate", "-m", folder, "--input", str(source), "--output", str(target), *SETTINGS, *more]


@pytest.fixture(scope="module")
def done(folder, tmp_path_factory) -> tuple[Path, bytes]:
    """An input, and what a run that nobody disturbs makes of it."""
    place = tmp_path_factory.mktemp("done")
    source, target = write(place / "in.jsonl", lines()), place / "out.jsonl"
    assert main(job(folder, source, target)) == 1  # some lines are bad
    return source, target.read_bytes()


def test_what_the_records_hold(done, tmp_path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_bytes(done[1])
    records = read(target)
    assert [r["index"] for r in records] == list(range(24))
    assert [r["custom_id"] for r in records] == [f"line {i}" for i in range(24)]
    text, chat, ids, bad, several, openai = records[:6]
    assert text["completion_tokens"] == 12 and text["finish_reason"] == "length" and text["error"] is None
    assert text["prompt_tokens"] == len("<user>some text<assistant>")  # the tokenizer has a chat template
    assert chat["prompt_tokens"] == len("<user>hello<assistant>") and chat["text"] != records[7]["text"]
    assert ids["completion_tokens"] == 30 and ids["prompt_tokens"] == 3
    assert "600" not in (bad["text"] or "") and "PromptError" in bad["error"] and bad["finish_reason"] == "error"
    assert len(set(several["text"])) == 2 and several["finish_reason"] == ["length", "length"]
    body = openai["response"]["body"]
    assert openai["response"]["status_code"] == 200 and openai["error"] is None
    assert len({c["message"]["content"] for c in body["choices"]}) == 2 and body["usage"]["completion_tokens"] == 10
    assert text["text"] == records[6]["text"], "the same prompt, greedily"


def test_killed_at_random_moments(folder, done, tmp_path) -> None:
    """SIGKILL, five times, each time when a random number of answers is there; then to the end."""
    source, want = done
    target = tmp_path / "out.jsonl"
    arguments, script = job(folder, source, target), Path(__file__).with_name("kill_jobs.py")
    command = [sys.executable, "-P", str(script), str(target), str(len(want) // 4), *arguments]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert killed.returncode == 0 and int(killed.stdout) > 0, killed.stdout + killed.stderr
    assert main(arguments) == 1
    assert target.read_bytes() == want


def test_cut_anywhere(folder, done, tmp_path) -> None:
    """Whatever a kill leaves of the file: the beginning of it, with half a line at the end, in any order."""
    source, want = done
    target, chance = tmp_path / "out.jsonl", random.Random(0)
    for _ in range(4):
        records = want.splitlines(keepends=True)
        chance.shuffle(records)
        shuffled = b"".join(records)
        target.write_bytes(shuffled[: chance.randrange(len(shuffled))])
        assert main(job(folder, source, target)) == 1
        assert target.read_bytes() == want


def test_a_finished_job_has_nothing_to_do(folder, done, tmp_path, monkeypatch) -> None:
    """It does not even load the model; a file that is complete but not yet in order is put in order."""
    source, want = done
    target = tmp_path / "out.jsonl"
    target.write_bytes(b"".join(reversed(want.splitlines(keepends=True))))
    from hf_cb.cli import model as models

    monkeypatch.setattr(models, "load", lambda args: pytest.fail("the model is loaded"))
    for _ in range(2):
        assert main(job(folder, source, target)) == 1
        assert target.read_bytes() == want


def test_failed_lines_are_tried_again_when_asked(folder, tmp_path) -> None:
    rows = [{"prompt": "good"}, {"prompt": "x" * 600}]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert main(job(folder, source, target)) == 1
    first = target.read_bytes()
    assert main(job(folder, source, target, "--retry-failed")) == 1
    assert target.read_bytes() == first


def test_sampling_depends_on_the_seed_and_the_line_alone(folder, tmp_path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "same"}, {"prompt": "same"}, {"prompt": "same", "seed": 7}])

    def texts(*more: str) -> list[str]:
        target = tmp_path / "out.jsonl"
        assert main(job(folder, source, target, "--restart", "--temperature", "3", *more)) == 0
        return [r["text"] for r in read(target)]

    first = texts()
    assert len(set(first)) == 3 and first == texts() == texts("--max-num-seqs", "1")[:3]
    other = texts("--seed", "1")
    assert other[0] != first[0] and other[2] == first[2]


def test_changes_between_runs_are_noticed(folder, done, tmp_path, capsys) -> None:
    source, want = done
    target = tmp_path / "out.jsonl"
    target.write_bytes(want)
    changed = lines()
    changed[2]["prompt_ids"] = [5, 6, 8]
    for rows, said in ((changed, "its line 3 is not"), (lines()[:20], "has 20 lines")):
        assert main(job(folder, write(tmp_path / "in.jsonl", rows), target)) == 2
        assert said in capsys.readouterr().err
    assert main(job(folder, source, target, "--temperature", "0.5")) == 2
    assert "other options" in capsys.readouterr().err
    assert target.read_bytes() == want
    longer = write(tmp_path / "in.jsonl", [*lines(), {"prompt": "one more"}])
    assert main(job(folder, longer, target)) == 1
    assert target.read_bytes().startswith(want) and len(read(target)) == 25


BAD_LINES = (
    ("{", "no JSON"),
    ("[]", "object"),
    ("{}", "must have one of"),
    ('{"prompt": "a", "messages": []}', "must have one of"),
    ('{"prompt": 5}', "must be a str"),
    ('{"prompt": "a", "colour": 5}', "colour"),
    ('{"prompt": "a", "temperature": "hot"}', "temperature"),
    ('{"prompt": "a", "request_id": "b"}', "request_id"),
    ('{"url": "/v1/embeddings", "body": {}}', "/v1/embeddings"),
    ('{"url": "/v1/completions", "body": {"prompt": "a", "suffix": "b"}}', "suffix"),
    ('{"url": "/v1/completions", "body": {"prompt": "a", "stream": true}}', "stream"),
    ('{"url": "/v1/completions", "body": {"prompt": "a", "model": "other"}}', "other"),
)


def test_bad_lines_have_errors_and_the_others_go_on(folder, tmp_path, capsys) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n" + "\n".join(text for text, _ in BAD_LINES) + '\n{"prompt": "good"}')
    assert main(job(folder, source, target)) == 1
    assert f"{len(BAD_LINES)} of {len(BAD_LINES) + 1} lines failed" in capsys.readouterr().err
    *bad, good = read(target)
    assert good["error"] is None and good["completion_tokens"] == 12
    for record, (text, word) in zip(bad, BAD_LINES, strict=True):
        assert word in json.dumps(record["error"]), text


def test_the_pages_lines_are_lines() -> None:
    page = (Path(__file__).parents[1] / "docs" / "jobs.md").read_text()
    inputs, _ = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    tasks = [read_task(Line(i, i + 1, raw.encode())) for i, raw in enumerate(inputs.splitlines())]
    assert [t.name["id"] for t in tasks] == ["a", "b", "c"] and tasks[1].options["do_sample"] is True


def test_what_cannot_be_done_is_said_before_anything_is_loaded(folder, done, tmp_path, capsys) -> None:
    source, _ = done
    other = tmp_path / "notes.jsonl"
    other.write_text('{"my": "own"}\n')
    target = tmp_path / "out.jsonl"
    for arguments, said in (
        (job(folder, tmp_path / "none", target), "not a file"),
        (job(folder, source, source), "same file"),
        (job(folder, source, tmp_path / "no" / "folder"), "cannot be written"),
        (job(folder, source, other), "its line 1 is not one"),
        (job("/nope", source, target), "/nope"),
        (job(folder, source, target, "-p", "x"), "--prompt"),
        (["generate", "--input", str(source)], "--output"),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
    assert other.read_text() == '{"my": "own"}\n'
    assert main(job(folder, source, other, "--restart")) == 1 and len(read(other)) == 24


def test_two_jobs_cannot_write_the_same_file(folder, done, tmp_path, capsys) -> None:
    from hf_cb.cli.job_output import open_output

    with open_output(tmp_path / "out.jsonl", "12345678"):
        assert main(job(folder, done[0], tmp_path / "out.jsonl")) == 2
    assert "another process" in capsys.readouterr().err


def test_an_interrupt_leaves_a_file_to_go_on_from(folder, done, tmp_path, capsys, monkeypatch) -> None:
    source, want = done
    from hf_cb.cli import job_output

    add, target = job_output.JobOutput.add, tmp_path / "out.jsonl"
    for stop, code in ((KeyboardInterrupt(), 130), (None, 143)):

        def add_three(self, index, digest, record, stop=stop) -> None:
            add(self, index, digest, record)
            if self.done % 3 == 0:
                if stop is None:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(5)
                raise stop

        monkeypatch.setattr(job_output.JobOutput, "add", add_three)
        assert main(job(folder, source, target)) == code
        assert "the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(job_output.JobOutput, "add", add)
    assert len(read(target)) == 6
    assert main(job(folder, source, target)) == 1
    assert target.read_bytes() == want


def test_a_loop_that_dies_takes_no_line_with_it(folder, done, tmp_path, capsys, monkeypatch) -> None:
    source, want = done
    from hf_cb.engine.engine import Engine

    step, target = Engine.step, tmp_path / "out.jsonl"

    def fail_late(self):
        if self.num_steps > 40:
            raise MemoryError("all gone")
        return step(self)

    monkeypatch.setattr(Engine, "step", fail_late)
    assert main(job(folder, source, target)) == 3
    assert "all gone" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(job(folder, source, target)) == 1
    assert target.read_bytes() == want


def test_half_a_surrogate_pair_in_an_id_is_no_trouble(folder, tmp_path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": "\ud800", "prompt": "x"}, {"id": "\u2028", "prompt": "y"}])
    assert main(job(folder, source, tmp_path / "out.jsonl")) == 0
    assert [json.loads(row)["id"] for row in (tmp_path / "out.jsonl").read_bytes().splitlines()] == ["\ud800", "\u2028"]


def test_a_full_disk_is_said_and_loses_nothing(tmp_path) -> None:
    path, record = tmp_path / "out.jsonl", {"text": "x" * 100, "error": None}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(HfCbError, match="cannot be written.*goes on"), open_output(path, "00") as output:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
            for i in range(100):
                output.add(i, "0" * 16, record)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with open_output(path, "00") as output:
        assert 10 < output.done < 100 and output.highest == output.done - 1
