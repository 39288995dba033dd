"""`hf-cb serve` under load from Locust for minutes: `make soak`.

usage: python tests/soak_server.py [--seconds 300] [--users 40] [--model FOLDER]

People stream answers, leave in the middle, ask for several at once, and make mistakes. At the end nothing has failed,
no request and no KV block is left, memory has not grown since a fifth of the way, and the server ends in good order.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil
from byte_models import byte_model, byte_tokenizer

GROWTH = 1.05
START_S, END_S = 120, 60
COMMAND = "import sys; from hf_cb.cli import main; sys.exit(main(sys.argv[1:]))"


class Memory(threading.Thread):
    """A process's memory, once a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process, self.samples = psutil.Process(pid), []
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(1.0):
            self.samples.append(self.process.memory_info().rss)

    def growth(self) -> float:
        """The last tenth beside the tenth after the first fifth; the least of each, as it goes up and down."""
        count = len(self.samples)
        early = self.samples[count // 5 : count // 5 + max(1, count // 10)]
        return min(self.samples[-max(1, count // 10) :]) / min(early)


def wait_for_address(server: subprocess.Popen, log: Path) -> str:
    end = time.monotonic() + START_S
    while not (found := re.search(r"hf-cb serve: .* at (http://\S+)/v1", log.read_text())):
        if server.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the server does not start:\n{log.read_text()}")
        time.sleep(0.1)
    return found[1]


def left_over(url: str) -> list[str]:
    """What is not as it is without requests, after a moment for those that have left."""
    names = ("hf_cb:num_requests_running", "hf_cb:num_requests_waiting", "hf_cb:kv_cache_usage_perc")
    end = time.monotonic() + 10
    while True:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        wrong = [line for line in lines if line.startswith(names) and float(line.split()[-1]) != 0]
        if not wrong or time.monotonic() > end:
            return wrong
        time.sleep(0.2)


def soak(folder: str, seconds: int, users: int, python: str) -> list[str]:
    """What went wrong."""
    here = Path(__file__).parent
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    options = ["--port", "0", "--device", "cpu", "--served-model-name", "soaked"]
    with log.open("w") as output:
        server = subprocess.Popen([sys.executable, "-P", "-c", COMMAND, "serve", folder, *options], stderr=output)
    try:
        url = wait_for_address(server, log)
        memory = Memory(server.pid)
        memory.start()
        command = [python, "-m", "locust", "-f", str(here / "locustfile.py"), "--headless", "--only-summary"]
        command += ["--host", url, "-u", str(users), "-r", str(max(1, users // 4)), "-t", f"{seconds}s"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        loaded = subprocess.run(command, env=environment, cwd=here)
        memory.stopped.set()
        memory.join()
        problems = [f"Locust says {loaded.returncode}"] if loaded.returncode else []
        problems += left_over(url)
        growth = memory.growth()
        print(f"memory: {max(memory.samples) / 2**20:.0f} MiB at most, {growth:.3f} times since a fifth of the way")
        problems += [f"memory grew {growth:.3f} times"] if growth > GROWTH else []
        server.send_signal(signal.SIGTERM)
        status = server.wait(END_S)
        problems += [f"the server ended with {status}"] if status else []
    finally:
        if server.poll() is None:
            server.kill()
    said = log.read_text()
    problems += [f"in the log {log}:\n{said[said.index('Traceback') :][:3000]}"] if "Traceback" in said else []
    if not problems:
        log.unlink()
    return problems


def main() -> int:
    """Exit code 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--users", type=int, default=40)
    parser.add_argument("--model", help="a model with a chat template (default: a tiny one, of random weights)")
    parser.add_argument("--locust-python", default=sys.executable, help="the Python of an environment with Locust")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            byte_model().save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
        problems = soak(args.model or folder, args.seconds, args.users, args.locust_python)
    print("\n".join(problems) or "all is well")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
