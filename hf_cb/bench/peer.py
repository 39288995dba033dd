"""A peer as an engine of the benchmark: a process in the peer's own Python, stopped while others are measured.

`peers/` has the programs; `peers/peer_loop.py` says what they are told and what they answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from hf_cb.bench.measured import CannotRun, Measured, latencies, measured
from hf_cb.bench.memory import family, peak_rss, reset_peak
from hf_cb.bench.workload import Workload

PEERS = ("vllm", "openvino", "llamacpp")
TIMEOUT = 3600.0  # seconds for one answer: compiling a large model, or a long run
GOODBYE = 10.0  # seconds that a process has to end by itself
TOLD = 2000  # characters of its standard error in a message


class PeerError(RuntimeError):
    """A peer's process failed, died, or answered nonsense; the message has the end of what it said."""


class Peer:
    """One peer; its process starts with the first run.

    Args:
        name: the engine's name.
        python: the Python that the peer is installed for.
        make_job: gives the job, and may convert the model for it; called at each start, off every clock.
        script: the program; by default that of the peer with this name.
        restart: start it anew for each run and end it after, so that it holds memory only in its turn.
        timeout: seconds that an answer may take.
    """

    def __init__(
        self,
        name: str,
        python: str | Path,
        make_job: Callable[[], dict[str, Any]],
        script: Path | None = None,
        restart: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        self.name = name
        self.restart = restart
        self._python, self._make_job, self._timeout = str(python), make_job, timeout
        self._script = script or Path(__file__).parent / "peers" / f"run_{name}.py"
        self._process: _Process | None = None
        self._startup_s = 0.0
        self._about: dict[str, Any] = {}

    def run(self, workload: Workload) -> Measured:
        """Raises PeerError, or CannotRun where the peer says that this is not for it."""
        try:
            process = self._process or self._start()
            with process.awake():
                pids = family(process.pid)
                reset_peak(pids)
                requests = [{"prompt": r.prompt, "max_new": r.max_new, "arrival": r.arrival} for r in workload.requests]
                answer = process.ask({"requests": requests}, self._timeout)
                peak = peak_rss(pids)
            result = self._result(workload, answer)
        except Exception:
            self.close()
            raise
        result.peak_bytes = peak
        if self.restart:
            self.close()
        return result

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _start(self) -> _Process:
        job = self._make_job()
        began = time.perf_counter()
        process = self._process = _Process(self.name, [self._python, str(self._script)])
        answer = process.ask(job, self._timeout)
        self._startup_s = time.perf_counter() - began
        if answer.get("ready") is not True:
            raise PeerError(f"{self.name} answered the job with {_short(answer)}")
        self._about = answer.get("about") or {}
        return process

    def _result(self, workload: Workload, answer: dict[str, Any]) -> Measured:
        try:
            tokens = [[int(t) for t in ids] for ids in answer["tokens"]]
            result = measured(self.name, workload, tokens, float(answer["seconds"]))
            result.ttft, result.itl = latencies(workload, answer["times"]) if answer["times"] else ([], [])
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"{self.name} answered a workload with {_short(answer)} ({error!r})") from error
        result.startup_s, result.about = self._startup_s, self._about
        return result


class _Process:
    """A process that answers a line with a line. Where signals can stop it, it does nothing between two questions."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        hidden = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV")  # they are of our Python
        env = {key: value for key, value in os.environ.items() if key not in hidden}
        # appending, since the reader moves the place; closed by end()
        self._said = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            self._said.close()
            raise PeerError(f"{name} does not start: {error}") from error
        self.pid = self._popen.pid
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"hf_cb-{name}", daemon=True)
        self._reader.start()

    def ask(self, question: dict[str, Any], timeout: float) -> dict[str, Any]:
        """One line there, one back."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it has died: there will be no answer
            self._popen.stdin.write(json.dumps(question).encode() + b"\n")
            self._popen.stdin.flush()
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise PeerError(f"{self.name} did not answer in {timeout:g} s{self._told()}") from None
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(GOODBYE)
            raise PeerError(f"{self.name} ended with status {self._popen.poll()}{self._told()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise PeerError(f"{self.name} answered {line[:200]!r} instead of a JSON object{self._told()}")
        if "cannot" in answer:
            raise CannotRun(str(answer["cannot"]))
        if "error" in answer:
            raise PeerError(f"{self.name}: {str(answer['error']).strip()[-TOLD:]}{self._told()}")
        return answer

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """It runs inside, and is stopped after."""
        self._signal("SIGCONT")
        try:
            yield
        finally:
            self._signal("SIGSTOP")

    def end(self) -> None:
        """By the end of its input, and if that does not help, by force; with all that it has started."""
        self._signal("SIGCONT")
        others: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            others = psutil.Process(self.pid).children(recursive=True)
        with contextlib.suppress(OSError):
            self._popen.stdin.close()  # type: ignore[union-attr]
        try:
            self._popen.wait(GOODBYE)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        for other in others:
            with contextlib.suppress(psutil.Error):
                other.kill()
        self._reader.join(GOODBYE)
        self._popen.stdout.close()  # type: ignore[union-attr]
        self._said.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _signal(self, name: str) -> None:
        """To the process and all that it has started."""
        number = getattr(signal, name, None)  # Windows has neither
        if number is None or self._popen.poll() is not None:
            return
        for pid in family(self.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _told(self) -> str:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - TOLD))
        text = self._said.read().decode(errors="replace").strip()
        return f"; it said: {text}" if text else ""


def _short(answer: Any) -> str:
    return json.dumps(answer)[:200]
