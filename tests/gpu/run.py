"""The parts of run.sh, one process each, and their JSON. A part that fails, hangs or takes too long says so and leaves
what it has found, and the rest go on."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# seconds that are kept for each; it may take those too that the ones before it have left over
PARTS = {"machine": 60, "kernel_tests": 90, "parity": 45, "attention": 60, "engine": 140, "kernels": 50, "variants": 20}
TOTAL = sum(PARTS.values())  # less than 8 minutes with what is around them
# NVIDIA's figures for the H200, less a tenth and a fifth: should they not have been measured
USUAL = {"bandwidth": 4.3e12, "rate": 7.9e11}


def run_part(name: str, speeds: dict[str, float], limit: float) -> dict[str, Any]:
    """A part's own JSON, from the file that it writes as it goes, and what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        found, said = Path(folder) / "found.json", Path(folder) / "said"
        command = [sys.executable, "-P", str(HERE / "parts.py"), name, str(found), json.dumps(speeds)]
        if name == "kernel_tests":
            command = test_command()
        began = time.perf_counter()
        status = finished(command, said, limit)
        seconds = round(time.perf_counter() - began, 1)
        output = said.read_text(errors="replace")
        result = counted(output) if name == "kernel_tests" else known(found)
        if status is None:
            result["error"] = f"took longer than {limit:.0f} s"
        elif status and name != "kernel_tests":
            result["error"] = f"exit status {status}"
        if status != 0:
            result["output"] = output[-6000:]
        return result | {"seconds": seconds}


def test_command() -> list[str]:
    """The tests of the kernels and of whole layers, side by side where pytest-xdist is installed: most of their time is
    Triton's compiler's."""
    command = [sys.executable, "-P", "-m", "pytest", "-v", "--tb=short", "-o", "addopts=", "--import-mode=importlib"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(max(1, min(12, (os.cpu_count() or 1) - 2)))]
    return [*command, "-p", "no:cacheprovider", "tests/gpu_kernels", "tests/test_gpu_stack.py"]


def finished(command: list[str], said: Path, limit: float) -> int | None:
    """The exit status of a command, what it said in a file, or None where it took too long. Its children end with it,
    and one that not even a kill ends (the driver may wait for a kernel that hangs) is left behind."""
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


def known(found: Path) -> dict[str, Any]:
    return json.loads(found.read_text()) if found.exists() else {}


def counted(output: str) -> dict[str, Any]:
    """How many tests had which outcome, from pytest's line for each: they are there when it was ended, too."""
    kinds = "(PASSED|FAILED|SKIPPED|ERROR)"
    lines = re.findall(rf"(?m)^(?:\[gw\d+\] \[ *\d+%\] {kinds} |\S.*::.* {kinds}(?: \(.*\))? +\[ *\d+%\]$)", output)
    outcomes = [(one or other).lower().replace("error", "errors") for one, other in lines]
    return {kind: outcomes.count(kind) for kind in dict.fromkeys(outcomes)}


def main() -> int:
    result: dict[str, Any] = {}
    began = time.perf_counter()
    names = os.environ.get("PARTS", ",".join(PARTS)).split(",")
    for place, name in enumerate(names):
        speeds = {key: result.get("machine", {}).get(key, usual) for key, usual in USUAL.items()}
        left = TOTAL - (time.perf_counter() - began)
        result[name] = run_part(name, speeds, left - sum(PARTS[later] for later in names[place + 1 :]))
        if name == "machine" and not USUAL.keys() <= result[name].keys():
            result[name]["assumed"] = USUAL
        print(f"{name}: {json.dumps(result[name])[:300]}", file=sys.stderr)
        if len(sys.argv) > 1:  # what is known so far, should the rest be cut off
            Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    return 1 if any("error" in part or part.get("failed") or "output" in part for part in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
