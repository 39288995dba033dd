"""`tests/gpu/run.sh` stays fit to run: its environment, its parts on a CPU with a tiny model, and its one JSON."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hf_cb.bench import speeds

HERE = Path(__file__).parent / "gpu"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its modules, imported as the script finds them."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module


def test_the_environment(tmp_path: Path) -> None:
    """The package is found as if it were installed, by a Python that has it nowhere; nothing is fetched."""
    python = tmp_path / "python"
    say = "import os, sys, hf_cb.kernels.device as d; print(d.__file__, os.environ['HF_HUB_OFFLINE'], *sys.argv[1:])"
    python.write_text(f'#!/bin/sh\ntest "$1 $2" = "-P tests/gpu/run.py" && exec {sys.executable} -P -c "{say}" "$3"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["bash", HERE / "run.sh", "a.json"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found, offline, argument = done.stdout.split()
    assert Path(found).resolve() == HERE.parents[1] / "kernels" / "device.py"
    assert (offline, argument) == ("1", "a.json")


def test_parts_on_a_cpu(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(speeds, "READ_BYTES", 2**24)
    monkeypatch.setattr(speeds, "SECONDS", 0.001)
    parts = script("parts")
    monkeypatch.setattr(parts, "DEVICE", "cpu")
    noted: list[dict[str, Any]] = []

    def note(found: dict[str, Any]) -> None:
        noted.append(json.loads(json.dumps(found)))

    machine = parts.machine({}, note)
    assert machine["bandwidth"] > 0 and machine["backends"]["reference"] is None
    assert "bandwidth" not in noted[0] and noted[1]["bandwidth"] == machine["bandwidth"]
    noted.clear()
    (found,) = parts.engine(machine, note).values()
    assert "decoding" not in noted[0]["tiny"], "what is known is told before the next thing is tried"
    assert ["ratio" in each["tiny"] for each in noted] == [False] * (len(noted) - 1) + [True]
    assert 0 < found["full_decodes_of_the_floor"] < 1
    assert found["problems"] == [] and found["steps"] > 0 and found["ratio"] > 0
    assert [decoding["requests"] for decoding in found["decoding"]] == [4, 1]
    for decoding in found["decoding"]:
        assert decoding["step_ms"] >= 0 and decoding["host_ms"] >= 0 and 0 <= (decoding["busy"] or 0) <= 1
    json.dumps(machine | found)


def test_the_times_of_attention(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with small steps; a backend that fails says so, and is no hindrance to the others."""
    times, noted = script("backend_times"), []
    cpu = times.backends()["cpu"]
    monkeypatch.setattr(cpu, "prepare", lambda *given: 1 / 0)
    monkeypatch.setattr(cpu, "missing", lambda self: None)
    monkeypatch.setattr(cpu, "unsupported", lambda self, layer: None)
    found = times.measure("cpu", speeds.Speeds(1e10, 1e11), lambda found: noted.append(len(found["cases"])))
    assert noted == [1, 2, 3, 4] and "flash" in found["problems"]
    for case in found["cases"]:
        assert ("ZeroDivisionError" in case["error"]) if case["backend"] == "cpu" else 0 < case["floor"] < 1


def test_the_floor_of_attention(script: Any) -> None:
    times, fast = script("backend_times"), speeds.Speeds(4.0e12, 8.0e14)
    layer = times.usual_layer("cpu")
    decode = 32 * 8192 * 8 * 256 * 2 + 32 * 32 * 256 * 2
    assert times.Case(32, 8192).floor(layer, fast) == decode / 4.0e12
    assert times.Case(1, 4, 4).floor(layer, speeds.Speeds(1e30, 2.0)) == (1 + 2 + 3 + 4) * 32 * 256


def test_a_step_of_attention(script: Any) -> None:
    """The last tokens of each request, in its own blocks."""
    times = script("backend_times")
    step = times.step_of(times.Case(2, 7, 3), torch.tensor([[3, 1], [2, 4]], dtype=torch.int32), 4)
    (group,) = step.groups
    assert group.slot_mapping.tolist() == [4, 5, 6, 16, 17, 18] and step.position_ids.tolist() == [4, 5, 6] * 2
    assert step.cu_seqlens_q.tolist() == [0, 3, 6] and step.seq_lens_list == [7, 7]


def test_the_share_of_busy_time(script: Any) -> None:
    share = script("busy").share
    assert share([(0, 2), (1, 3), (5, 6)], 0, 8) == 0.5
    assert share([(0, 10)], 2, 4) == 1 and share([(0, 1), (9, 10)], 2, 4) == 0
    assert share([(0, 4), (1, 2), (3, 5)], 0, 10) == 0.5, "one inside another, and one that begins before it ends"


def test_the_json(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """A part that fails leaves its reason, and the others go on."""
    run, given = script("run"), []

    def part(name: str, speeds: dict[str, float], limit: float) -> dict[str, Any]:
        given.append((name, speeds, limit))
        return {"machine": {"bandwidth": 1.0, "rate": 2.0, "torch": "x"}, "engine": {"error": "late"}}.get(name, {})

    monkeypatch.setattr(run, "run_part", part)
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path / "out.json")])
    assert run.main() == 1, "a part has failed"
    out = capsys.readouterr().out
    assert json.loads(out) == json.loads((tmp_path / "out.json").read_text())
    assert list(json.loads(out)) == list(run.PARTS) and json.loads(out)["engine"] == {"error": "late"}
    assert all(speeds == {"bandwidth": 1.0, "rate": 2.0} for name, speeds, _ in given if name != "machine")
    upto, limits = list(accumulate(run.PARTS.values())), [limit for _, _, limit in given]
    assert limits == pytest.approx(upto, abs=5), "each may take what those before it have left"
    assert upto[-1] < 8 * 60
    missing = {name for name in run.PARTS if name != "kernel_tests" and not hasattr(script("parts"), name)}
    assert not missing


def test_without_the_machine_s_speeds(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run, given = script("run"), []
    monkeypatch.setattr(run, "run_part", lambda name, speeds, limit: given.append(speeds) or {"error": "late"})
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert run.main() == 1
    assert given[1:] == [run.USUAL] * (len(run.PARTS) - 1)
    assert json.loads(capsys.readouterr().out)["machine"] == {"error": "late", "assumed": run.USUAL}


def test_of_a_part_that_is_too_slow_the_rest_is_kept(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what it has started, which may hold on to its output, goes with it."""
    run = script("run")
    (tmp_path / "parts.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('begun', flush=True)\n"
        'pathlib.Path(sys.argv[2]).write_text(\'{"tok_s": 5, "child": %d}\' % child.pid)\n'
        "time.sleep(60)"
    )
    monkeypatch.setattr(run, "HERE", tmp_path)
    found = run.run_part("engine", {}, 3)
    assert (found["tok_s"], found["error"], found["output"]) == (5, "took longer than 3 s", "begun\n")
    assert found["seconds"] < 20
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(found["child"]).wait(20)


def test_a_part_that_dies_says_so(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("run")
    monkeypatch.setattr(run, "HERE", Path("/nowhere"))
    found = run.run_part("engine", {}, 30)
    assert found["error"] == "exit status 2" and "/nowhere/parts.py" in found["output"]


@pytest.mark.parametrize("workers", [0, 2])
def test_tests_are_counted(script: Any, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one process or by several, whether or not they come to their summary."""
    run = script("run")
    if workers:
        pytest.importorskip("xdist")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(3))\n"
        "def test_one(n):\n    assert n != 2\n"
        "def test_two():\n    pytest.skip('not (here)')\n"
        "@pytest.fixture\ndef broken():\n    raise ValueError\n"
        "def test_three(broken):\n    pass\n"
    )
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command += ["-n", str(workers)] if workers else []
    monkeypatch.setattr(run, "test_command", lambda: [*command, str(tmp_path)])
    found = run.run_part("kernel_tests", {}, 60)
    counts = dict(passed=2, failed=1, skipped=1, errors=1)
    assert {kind: found[kind] for kind in counts} == counts and "error" not in found
    assert run.counted(found["output"].partition("= ERRORS =")[0]) == counts


def test_variants_of_attention(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is what is launched, and the launcher is as before afterwards."""
    pytest.importorskip("triton", reason="triton is not installed")
    module, seen = script("variants"), []
    before = dict(vars(module.op))

    def attend(**given: Any) -> None:
        seen.append((module.op.config_for, module.op.PROGRAMS_PER_SM))
        if len(seen) == 3:
            raise ValueError("too large")

    monkeypatch.setattr(module.op, "paged_attention", attend)
    monkeypatch.setattr(module, "CASES", ("decode, one",))
    monkeypatch.setattr(module, "SPLITS", (2, 3))
    monkeypatch.setattr(module, "DECODES", [module.Config(16, 32, 4, 2)])
    noted: list[int] = []
    (found,) = module.measure("cpu", lambda found: noted.append(len(found["decode, one"]))).values()
    assert list(found) == ["as chosen", "2 programs", "3 programs", "16 32 4 2"] and noted == [1, 2, 3, 4]
    assert "too large" in found["3 programs"] and [programs for _, programs in seen[1:3]] == [2, 3]
    assert seen[3][0](None, 1, 2) == module.Config(16, 32, 4, 2)
    assert all(before[key] is vars(module.op)[key] for key in ("config_for", "PROGRAMS_PER_SM"))
