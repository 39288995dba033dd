"""`hf-cb replay` from end to end on a tiny model."""

import importlib.util
import json
from pathlib import Path

import pytest
from running import interrupted_after
from tiny_models import make_model, make_tokenizer

from hf_cb.bench.replay import play
from hf_cb.bench.replay.plot import levels
from hf_cb.cli import main

FEW = ["--generate", "poisson", "--rate", "60", "--requests", "6", "--prompt-lengths", "uniform:5:20"]
FEW += ["--output-lengths", "uniform:2:6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_model("Llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def test_two_settings_are_compared_and_their_files_too(folder, tmp_path, capsys):
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    trace = tmp_path / "trace.jsonl"
    settings = ["--b", "max_num_seqs=1", "--repeat", "2", "--slo", "ttft=10s,itl_p95=10s"]
    args = ["replay", "-m", folder, *FEW, *settings, "--json", str(files[0]), "--save-trace", str(trace)]
    assert main(args) == 0
    said = capsys.readouterr()
    assert said.err.startswith("2 rounds of 2 settings; the arrivals alone take ")
    said = said.out
    assert "B against A, the same requests" in said and "goodput" in said and "100.0% had ttft <= 10000 ms" in said
    found = json.loads(files[0].read_text())
    assert list(found["settings"]) == ["A", "B"] and len(found["turns"]) == 4
    assert found["settings"]["B"]["options"]["max_num_seqs"] == 1 and found["machine"]["cores"] > 0
    assert found["settings"]["A"]["latency"]["ttft"]["n"] == 6 and found["settings"]["A"]["counts"]["done"] == 12
    assert {row["name"] for row in found["differences"][0]["rows"]} >= {"ttft_p50", "itl_p95", "throughput", "goodput"}

    assert main(["replay", str(trace), "-m", folder, "--a", "", "--repeat", "2", "--json", str(files[1])]) == 0
    capsys.readouterr()
    assert main(["replay", "--compare", *map(str, files)]) == 0
    said = capsys.readouterr().out
    assert "A (2) against A (1)" in said and "measured at different times" in said
    for key, word in {"machine": "cpu", "model": "dtype", "trace": "fingerprint"}.items():
        other = json.loads(files[1].read_text())
        other[key][word] = "another"
        files[1].with_name("other.json").write_text(json.dumps(other))
        assert main(["replay", "--compare", str(files[0]), str(files[1].with_name("other.json"))]) == 2
        assert "'another'" in capsys.readouterr().err


def test_a_sweep_ends_in_a_recommendation(folder, capsys):
    assert (
        main(["replay", "-m", folder, *FEW, "--sweep", "prefill_chunk=4,64", "--repeat", "2", "--base", "block_size=8"])
        == 0
    )
    said = capsys.readouterr().out
    assert "prefill_chunk=64 against prefill_chunk=4" in said
    assert "no setting is to be preferred" in said or "take prefill_chunk=" in said


def test_more_than_two_settings_have_names(folder, capsys):
    several = [
        "--setting",
        "plain:",
        "--setting",
        "first:policy=prefill_first,max_num_seqs=2",
        "--setting",
        "c:block_size=8",
    ]
    assert main(["replay", "-m", folder, *FEW, *several, "--repeat", "1"]) == 0
    said = capsys.readouterr().out
    assert "first  (policy=prefill_first,max_num_seqs=2)" in said and "c against plain" in said
    assert "one round: intervals tell of other requests" in said


def test_rejections_are_counted_and_not_hidden(folder, tmp_path, capsys):
    trace = tmp_path / "burst.jsonl"
    row = {"arrival": 0.0, "prompt_tokens": 60, "output_tokens": 60}
    trace.write_text("".join(json.dumps(row) + "\n" for _ in range(12)))
    assert main(["replay", str(trace), "-m", folder, "--a", "max_queue_size=1,max_num_seqs=1", "--repeat", "1"]) == 0
    said = capsys.readouterr().out
    assert "rejected: the latencies are those of the other requests alone" in said


def test_what_is_wrong_is_said_before_the_work(folder, tmp_path, capsys):
    wrong = {
        ("--a", ""): "either a TRACE or --generate",
        ("--generate", "poisson"): "There is no setting",
        ("--generate", "even", "--a", ""): "'even'",
        (*FEW, "--b", "kv_dtype=int8"): "must not differ in the precision",
        (*FEW, "--a", "", "--sweep", "block_size=8,16"): "--sweep names all settings",
        (*FEW, "--setting", "block_size=8"): "NAME:key=value",
        (*FEW, "--a", "", "--slo", "ttft=fast"): "a term and a time",
        (*FEW, "--a", "", "--json", str(tmp_path / "none" / "x.json")): "no such folder",
        (*FEW, "--a", "", "--json", str(tmp_path)): "this is a folder",
        (*FEW, "--a", "", "--save-trace", str(tmp_path)): "this is a folder",
        (*FEW, "--a", "", "--plot", str(tmp_path / "none" / "x.png")): "no such folder",
        (*FEW, "--a", "", "--confidence", "1"): "--confidence",
        ("--compare", "x.json", "y.json"): "--compare x.json",
        (*FEW, "--compare", "x.json", "y.json"): "runs nothing",
    }
    for args, message in wrong.items():
        assert main(["replay", "-m", folder, *args]) == 2, args
        assert message in capsys.readouterr().err, args


def test_an_interrupt_leaves_the_rounds_that_are_finished(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(play, "_turn", interrupted_after(3, play._turn))
    file = tmp_path / "x.json"
    args = ["replay", "-m", folder, *FEW, "--a", "", "--b", "max_num_seqs=1", "--repeat", "4", "--json", str(file)]
    assert main(args) == 130  # in the second turn of the second round
    said = capsys.readouterr()
    assert "interrupted: 1 of 4 rounds" in said.err and "interrupted: 1 of 4 rounds" in said.out
    assert "B against A, the same requests" in said.out and len(json.loads(file.read_text())["turns"]) == 2
    assert main(args) == 130  # in the first round
    said = capsys.readouterr()
    assert said.err.endswith("hf-cb replay: interrupted\n") and not said.out


@pytest.mark.parametrize("turns", [[], [7], [{"setting": "A", "round": 0}]])
def test_a_file_that_is_no_result_is_refused(turns, tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"turns": turns, "settings": {"A": {"given": "", "options": {}}}, "trace": {}}))
    assert main(["replay", "--compare", str(file), str(file)]) == 2
    assert "is no file of hf-cb replay --json" in capsys.readouterr().err


def test_what_failed_is_told_with_its_reason(folder, tmp_path, capsys):
    trace = tmp_path / "odd.jsonl"
    trace.write_text('{"arrival": 0, "prompt": [5], "output_tokens": 2, "options": {"colour": 1}}')
    assert main(["replay", str(trace), "-m", folder, "--a", "", "--repeat", "1"]) == 1
    assert "colour" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_picture_is_drawn(folder, tmp_path):
    picture = tmp_path / "x.png"
    assert main(["replay", "-m", folder, *FEW, "--a", "", "--b", "", "--repeat", "1", "--plot", str(picture)]) == 0
    assert Path(picture).stat().st_size > 10_000


def test_levels_count_open_spans():
    assert levels([(1.0, 3.0), (2.0, 4.0)]) == ([0.0, 1.0, 2.0, 3.0, 4.0], [0, 1, 2, 1, 0])
    assert levels([]) == ([0.0], [0])
