"""`tests/gpu/run.sh` stays fit to run: its environment, its parts on a CPU with a tiny model, and its one JSON."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    machine = parts.machine({})
    assert machine["bandwidth"] > 0 and machine["backends"]["reference"] is None
    noted: list[dict[str, Any]] = []
    (found,) = parts.engine(machine, lambda found: noted.append(json.loads(json.dumps(found)))).values()
    assert ["ratio" in each["tiny"] for each in noted] == [False, True], "ours is known before the other has run"
    assert found["problems"] == [] and found["steps"] > 0 and found["ratio"] > 0
    (decoding,) = found["decoding"]
    assert decoding["requests"] == 4 and decoding["step_ms"] >= 0 and decoding["host_ms"] >= 0
    assert 0 <= (decoding["busy"] or 0) <= 1
    json.dumps(machine | found)


def test_the_share_of_busy_time(script: Any) -> None:
    share = script("busy").share
    assert share([(0, 2), (1, 3), (5, 6)], 0, 8) == 0.5
    assert share([(0, 10)], 2, 4) == 1 and share([(0, 1), (9, 10)], 2, 4) == 0
    assert share([(0, 4), (1, 2), (3, 5)], 0, 10) == 0.5, "one inside another, and one that begins before it ends"


def test_the_json(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """A part that fails leaves its reason, and the others go on."""
    run, given = script("run"), []

    def part(name: str, speeds: dict[str, float]) -> dict[str, Any]:
        given.append((name, speeds))
        return {"machine": {"bandwidth": 1.0, "rate": 2.0, "torch": "x"}, "engine": {"error": "late"}}.get(name, {})

    monkeypatch.setattr(run, "run_part", part)
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path / "out.json")])
    assert run.main() == 1, "a part has failed"
    out = capsys.readouterr().out
    assert json.loads(out) == json.loads((tmp_path / "out.json").read_text())
    assert list(json.loads(out)) == list(run.PARTS) and json.loads(out)["engine"] == {"error": "late"}
    assert all(speeds == {"bandwidth": 1.0, "rate": 2.0} for name, speeds in given if name != "machine")
    assert sum(run.PARTS.values()) < 8 * 60
    missing = {name for name in run.PARTS if name != "kernel_tests" and not hasattr(script("parts"), name)}
    assert not missing


def test_of_a_part_that_is_too_slow_the_rest_is_kept(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = script("run")
    (tmp_path / "parts.py").write_text(
        "import pathlib, sys, time\npathlib.Path(sys.argv[2]).write_text('{\"tok_s\": 5}')\ntime.sleep(60)"
    )
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setitem(run.PARTS, "engine", 2)
    found = run.run_part("engine", {})
    assert (found["tok_s"], found["error"]) == (5, "took longer than 2 s")


def test_a_part_that_dies_says_so(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("run")
    monkeypatch.setattr(run, "HERE", Path("/nowhere"))
    found = run.run_part("engine", {})
    assert found["error"] == "exit status 2" and "/nowhere/parts.py" in found["output"]
