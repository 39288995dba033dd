"""The parts of run.sh, one process each, and their JSON. A part that fails or takes too long says so, and the rest go
on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# what each may take, in seconds; together less than 8 minutes
PARTS = {"machine": 40, "kernel_tests": 100, "parity": 60, "kernels": 60, "attention": 60, "engine": 150}


def run_part(name: str, speeds: dict[str, float]) -> Any:
    """A part's own JSON, from the file that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        if name == "kernel_tests":
            tests = ["-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "tests/gpu_kernels"]
            command = [sys.executable, "-P", "-m", "pytest", *tests]
        else:
            command = [sys.executable, "-P", str(HERE / "parts.py"), name, str(found), json.dumps(speeds)]
        began = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PARTS[name])
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"")[-2000:]
            known = json.loads(found.read_text()) if found.exists() else {}  # before it was too late
            return known | {"error": f"took longer than {PARTS[name]} s", "output": said.decode(errors="replace")}
        seconds = round(time.perf_counter() - began, 1)
        said = (done.stdout + done.stderr)[-3000:]
        if name == "kernel_tests":
            counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", said)}
            return counts | {"seconds": seconds} | ({} if done.returncode == 0 else {"output": said})
        if done.returncode or not found.exists():
            return {"error": f"exit status {done.returncode}", "output": said, "seconds": seconds}
        return json.loads(found.read_text()) | {"seconds": seconds}


def main() -> int:
    result: dict[str, Any] = {}
    for name in os.environ.get("PARTS", ",".join(PARTS)).split(","):
        machine = result.get("machine", {})
        speeds = {key: machine[key] for key in ("bandwidth", "rate") if key in machine}
        result[name] = run_part(name, speeds)
        print(f"{name}: {json.dumps(result[name])[:300]}", file=sys.stderr)
        if len(sys.argv) > 1:  # what is known so far, should the rest be cut off
            Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    return 1 if any("error" in part or part.get("failed") for part in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
