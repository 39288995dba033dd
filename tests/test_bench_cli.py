"""`hf-cb bench` with peers, whose Python is a stand-in that runs a stand-in for the peer."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from running import interrupted_after
from test_bench_peers import GOOD
from tiny_models import make_model, make_tokenizer

from hf_cb.bench import run, speeds
from hf_cb.cli import main

SMALL = ["--engines", "hf_cb,vllm", "--requests", "3", "--prompt-mean", "20", "--out-min", "2", "--out-max", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_model("Llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def quick_speeds(monkeypatch) -> None:
    """The machine's speed is not what these tests are about."""
    monkeypatch.setattr(speeds, "READ_BYTES", 2**24)
    monkeypatch.setattr(speeds, "SECONDS", 0.001)


@pytest.fixture
def env(tmp_path) -> str:
    """A Python that runs the stand-in, whatever it is told to run."""
    (tmp_path / "peer.py").write_text(GOOD)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/peer.py"\n')
    python.chmod(0o755)
    return f"vllm={python}"


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for a Python")


def test_a_peer_is_in_the_table_and_in_the_figures(folder, env, tmp_path, capsys):
    file = tmp_path / "bench.json"
    args = ["bench", "-m", folder, *SMALL, "--env", env, "--repeat", "2", "--no-first-token", "--json", str(file)]
    assert main(args) == 1, "it makes other tokens"
    said = capsys.readouterr().out
    figures = json.loads(file.read_text())
    peer = figures["engines"]["vllm"]
    assert len(peer["runs"]) == 2 and peer["startup_s"] > 0 and peer["of_floor"] > 0 and peer["about"]
    assert set(figures["ratios"]) == {"hf_cb / vllm"}
    assert figures["floor"]["product_gflop_s"] > 0
    assert "floor: " in said and "is it the same model?" in said
    assert figures["arguments"]["prefix_caching"] is False and figures["arguments"]["max_num_seqs"] == 64


def test_an_interrupt_leaves_the_rounds_that_are_finished(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "_attempt", interrupted_after(5, run._attempt))
    file = tmp_path / "bench.json"
    few = ["--engines", "hf_cb,generate", *SMALL[2:], "--repeat", "4", "--json", str(file)]
    assert main(["bench", "-m", folder, *few]) == 130  # after two warm-ups, in the second run of the second round
    said, figures = capsys.readouterr(), json.loads(file.read_text())
    assert "interrupted: 1 of 4 rounds" in said.err and "PROBLEM interrupted: 1 of 4 rounds" in said.out
    assert [len(engine["runs"]) for engine in figures["engines"].values()] == [1, 1] and "first_token" not in figures
    assert main(["bench", "-m", folder, *few]) == 130
    said = capsys.readouterr()
    assert said.err.endswith("hf-cb bench: interrupted\n") and not said.out


@pytest.mark.parametrize("workload", ["single", "shared", "poisson"])
def test_workloads(folder, env, tmp_path, workload):
    file = tmp_path / "bench.json"
    args = ["--env", env, "--workload", workload, "--rate", "50", "--no-first-token", "--json", str(file)]
    main(["bench", "-m", folder, *SMALL, *args])
    figures = json.loads(file.read_text())
    assert figures["workload"]["name"] == workload and set(figures["engines"]) == {"hf_cb", "vllm"}
    assert (figures["workload"]["last_arrival_s"] > 0) == (workload == "poisson")
    assert figures["arguments"]["prefix_caching"] == (workload == "shared")


def test_what_is_wrong_is_said_before_the_work(folder, env, tmp_path, capsys):
    wrong = {
        ("--engines", "hf_cb,vllm"): "--env vllm=PYTHON",
        ("--env", "warp=/bin/sh"): "a peer of",
        ("--env", "vllm"): "PEER=PATH",
        ("--env", f"vllm={tmp_path}/none"): "no such file",
        ("--peer-model", f"llamacpp={tmp_path}/none.gguf"): "no such file",
        ("--plot", f"{tmp_path}/none/x.png"): "no such folder",
        ("--workload", "poisson", "--out-max", "20", "--rate", "0"): "rate",
    }
    for args, message in wrong.items():
        assert main(["bench", "-m", folder, *args]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_plot_is_drawn(folder, tmp_path):
    args = ["--engines", "hf_cb", "--workload", "single", "--prompt-mean", "9", "--out-max", "2", "--no-first-token"]
    assert main(["bench", "-m", folder, *args, "--plot", str(tmp_path / "x.png")]) == 0
    assert Path(tmp_path / "x.png").stat().st_size > 1000
