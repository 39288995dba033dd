"""`hf-cb trace` on a tiny model in a folder, and `handle.why()` through the face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import greedy, make_model, make_prompts, make_tokenizer

from hf_cb import EngineConfig
from hf_cb.cli import main
from hf_cb.errors import ManagerStoppedError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_model("Llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": [5, 6, 7], "max_new_tokens": 3},
        {"prompt": "the answer", "arrival": 0.01},
        {"prompt": [9] * 40},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return str(path)


def test_a_trace_a_picture_and_a_line_for_each_request(folder, prompts, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    out, plot = tmp_path / "t.json", tmp_path / "t.svg"
    options = [
        "--max-new-tokens",
        "5",
        "--max-batch-tokens",
        "16",
        "-o",
        str(out),
        "--plot",
        str(plot),
        "--by",
        "steps",
    ]
    assert main(["trace", "-m", folder, "--prompts", prompts, *options]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" after ")[0] for line in said[:3]] == [f"req_{i} reached its length" for i in range(3)]
    assert said[3].endswith(f"steps in {out}: open it in https://ui.perfetto.dev") and str(plot) in said[4]
    assert json.loads(out.read_text())["traceEvents"] and "<svg" in plot.read_text()


def test_the_default_workload(folder, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--requests", "3", "--rate", "0", "--max-new-tokens", "4", "--max-model-len", "60"]
    assert main(["trace", "-m", folder, *options, "--kv-budget", "1MiB"]) == 0
    assert {"trace.json"} <= {path.name for path in tmp_path.iterdir()} <= {"trace.json", "trace.png"}
    assert capsys.readouterr().out.count("tokens at") == 3


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "there are no prompts"),
        ("[1, 2", "line 1: this is no JSON"),
        ('{"text": "a"}', 'an object with a "prompt" is wanted'),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens must be a whole number from 1 up, not 0"),
        ('{"prompt": "a", "arrival": -1}', "arrival must be a number of seconds from 0 up, not -1"),
    ],
)
def test_bad_prompts_are_refused_before_a_model_is_loaded(tmp_path, capsys, content: str, complaint: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    assert main(["trace", "-m", "nowhere", "--prompts", str(path), "-o", str(tmp_path / "t.json")]) == 2
    assert complaint in capsys.readouterr().err


def test_places_that_cannot_be_written_to_are_refused_before_the_work(tmp_path, capsys) -> None:
    assert main(["trace", "-m", "nowhere", "-o", str(tmp_path / "no" / "t.json")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["trace", "-m", "nowhere", "-o", str(tmp_path)]) == 2
    assert "this is a folder" in capsys.readouterr().err
    assert main(["trace", "-m", "nowhere", "--prompts", str(tmp_path / "no"), "-o", str(tmp_path / "t.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.usefixtures("patched")
def test_a_handle_says_why_before_during_and_after(shared_llama) -> None:
    config = EngineConfig(max_num_seqs=1)
    manager = shared_llama.init_continuous_batching(continuous_batching_config=config)
    first, second = (manager.submit(p, greedy(30)) for p in make_prompts([9, 12]))
    assert first.why().startswith("req_0 waits, ") and "queued so far" in first.why()
    manager.start()
    next(iter(first))
    assert first.why().startswith(("req_0 decodes, ", "req_0 reached"))
    second.result()
    assert "because all places were taken (1 of 1 requests)" in second.why()
    assert "prefill of 12 tokens in 1 step" in second.why()
    pair = manager.submit(make_prompts([5])[0], greedy(3, do_sample=True), num_return_sequences=2)
    pair.outputs()
    assert [line.split()[0] for line in pair.why().splitlines()] == ["req_2", "req_2__child#0"]
    cancelled = manager.submit(make_prompts([5])[0], greedy(100))
    cancelled.cancel()
    cancelled.outputs()
    assert cancelled.why().startswith("req_3 was cancelled after")
    manager.stop()
    assert "because all places were taken" in second.why()


@pytest.mark.usefixtures("patched")
def test_why_when_the_engine_has_died(shared_llama) -> None:
    with shared_llama.continuous_batching_context_manager() as manager:
        handle = manager.submit(make_prompts([5])[0], greedy(200))
        next(iter(handle))

        def broken() -> list:
            raise KeyError("gone")

        manager.engine.step = broken
        handle.wait()
        assert handle.why().startswith("req_0 failed after ") and "(KeyError: 'gone')" in handle.why()
        with pytest.raises(ManagerStoppedError):
            manager.submit([1])
