"""The benchmark's peers: processes that speak a line protocol, run by stand-ins for the real programs."""

import ast
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_cb.bench import peers
from hf_cb.bench.engines import NAMES
from hf_cb.bench.measured import Measured
from hf_cb.bench.memory import peak_rss, reset_peak
from hf_cb.bench.peer import PEERS, Peer, PeerError
from hf_cb.bench.report import summarize, table
from hf_cb.bench.run import run_engines
from hf_cb.bench.workload import BenchRequest, Workload

FOLDER = Path(peers.__file__).parent
LOAD = Workload("few", [BenchRequest([5, 6, 7], 3), BenchRequest([8, 9], 2)])
GOOD = f"""
import subprocess, sys, time
sys.path.insert(0, {str(FOLDER)!r})
from peer_loop import CannotRun, Peer, serve

class Fake(Peer):
    def __init__(self, job):
        print("noise of a library")
        if job.get("dtype") == "float16":
            raise CannotRun("it knows no float16")
        self.left, self.resets, self.about = {{}}, 0, {{"version": "1.0"}}
        if job.get("child"):
            self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def reset(self):
        self.resets += 1

    def add(self, index, prompt, max_new):
        if prompt[0] == 13:
            raise ValueError("unlucky prompt")
        self.left[index] = [prompt[0], max_new]

    def busy(self):
        return bool(self.left)

    def step(self):
        made = [(index, [first + self.resets]) for index, (first, _) in self.left.items()]
        for index in list(self.left):
            self.left[index][1] -= 1
            if self.left[index][1] == 0:
                del self.left[index]
        return made

serve(Fake)
"""
READY = "import sys\nsys.stdin.readline()\nprint('{\"ready\": true}', flush=True)\nsys.stdin.readline()\n"


@pytest.fixture
def make(tmp_path):
    """Makes peers of a program's text, and ends them."""
    made: list[Peer] = []

    def peer(text: str = GOOD, job: dict[str, Any] | None = None, **options: Any) -> Peer:
        script = tmp_path / f"run_{len(made)}.py"
        script.write_text(text)
        options = {"timeout": 60.0} | options
        made.append(Peer("vllm", sys.executable, lambda: job or {}, script, **options))
        return made[-1]

    yield peer
    for one in made:
        one.close()


def process_of(peer: Peer) -> psutil.Process:
    assert peer._process is not None
    return psutil.Process(peer._process.pid)


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_peer_is_measured_by_its_own_clock(make):
    peer = make()
    result = peer.run(LOAD)
    assert result.tokens == [[6] * 3, [9] * 2] and result.problems == []
    assert (result.engine, result.output_tokens, result.about) == ("vllm", 5, {"version": "1.0"})
    assert len(result.ttft) == 2 and len(result.itl) == 3
    assert all(0 <= t <= result.seconds for t in result.ttft)
    assert result.startup_s is not None and result.startup_s > 0
    assert result.peak_bytes is None or result.peak_bytes > 2**20


def test_a_process_stays_for_the_next_round_and_forgets_prefixes(make):
    peer = make()
    peer.run(LOAD)
    first = process_of(peer)
    assert peer.run(LOAD).tokens[0] == [7] * 3, "reset a second time"
    assert process_of(peer) == first


def test_a_peer_can_be_there_for_its_turn_only(make):
    peer = make(restart=True)
    assert [peer.run(LOAD).tokens[0][0] for _ in range(2)] == [6, 6]
    assert peer._process is None


def test_requests_go_in_when_they_arrive(make):
    load = Workload("late", [BenchRequest([1], 1), BenchRequest([2], 2, arrival=0.2)])
    result = make().run(load)
    assert result.seconds >= 0.2 and max(result.ttft) < result.seconds - 0.1, "a first token is timed from its arrival"
    assert [len(t) for t in result.tokens] == [1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal that stops a process")
def test_a_peer_and_its_children_stand_still_between_runs(make):
    peer = make(job={"child": True})
    peer.run(LOAD)
    process = process_of(peer)
    everybody = [process, *process.children()]
    assert len(everybody) == 2
    until(lambda: all(p.status() == psutil.STATUS_STOPPED for p in everybody))
    assert peer.run(LOAD).problems == []


def test_closing_ends_everything(make):
    peer = make(job={"child": True})
    peer.run(LOAD)
    process = process_of(peer)
    everybody = [process, *process.children()]
    peer.close()
    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in everybody))
    peer.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys; sys.exit('no such package: warp')", r"ended with status 1; it said: no such package: warp"),
        (READY + "sys.exit('out of memory')", "ended with status 1; it said: out of memory"),
        ("print('hello', flush=True)\nimport sys; sys.stdin.read()", "answered b'hello.*' instead of a JSON object"),
        (READY + "print('[1, 2]', flush=True)\nsys.stdin.read()", "instead of a JSON object"),
        (READY + "print('{\"seconds\": 1}', flush=True)\nsys.stdin.read()", "answered a workload with"),
        ("print('{\"tokens\": []}', flush=True)\nimport sys; sys.stdin.read()", "answered the job with"),
        ('import sys; print(\'{"error": "bad weights"}\', flush=True); sys.stdin.read()', "vllm: bad weights"),
    ],
)
def test_a_peer_that_fails_says_why_and_is_gone(make, text, says):
    peer = make(text)
    with pytest.raises(PeerError, match=says):
        peer.run(LOAD)
    assert peer._process is None


def test_a_peer_that_says_nothing_is_not_waited_for_without_end(make):
    peer = make("import sys; print('thinking', file=sys.stderr, flush=True); sys.stdin.read()", timeout=0.5)
    with pytest.raises(PeerError, match="did not answer in 0.5 s"):
        peer.run(LOAD)
    assert peer._process is None


def test_an_exception_in_a_run_comes_with_its_traceback(make):
    with pytest.raises(PeerError, match=r"(?s)Traceback.*unlucky prompt.*it said: noise of a library"):
        make().run(Workload("bad", [BenchRequest([13], 1)]))


def test_a_python_that_is_not_there(tmp_path):
    with pytest.raises(PeerError, match="does not start"):
        Peer("vllm", tmp_path / "python", dict).run(LOAD)


def test_what_a_peer_cannot_do_is_no_failure(make):
    peer = make(job={"dtype": "float16"})
    result = run_engines([peer, Ours([[6, 1, 1], [9, 1]])], LOAD)
    assert result.unable == {"vllm": "it knows no float16"} and result.problems == []
    assert list(result.rounds) == ["hf_cb"]
    assert "cannot: it knows no float16" in table(summarize(result))


def test_a_failing_peer_does_not_end_the_others(make):
    result = run_engines([make(READY + "sys.exit(3)"), Ours([[6, 1, 1], [9, 1]])], LOAD)
    (problem,) = result.problems
    assert problem.startswith("vllm failed: PeerError: vllm ended with status 3")
    assert list(result.rounds) == ["hf_cb"]


def test_a_peer_with_too_few_tokens_or_with_other_tokens_is_a_problem(make):
    short = GOOD.replace("return made", "return made[:1]")
    assert make(short).run(LOAD).problems == ["request 1: 0 tokens instead of 2"]
    result = run_engines([Ours([[1, 1, 1], [1, 1]]), make()], LOAD)
    assert result.problems == ["vllm: only 0% of its first tokens are hf_cb's: is it the same model?"]
    same = run_engines([Ours([[7, 1, 1], [10, 1]]), make()], LOAD)  # the warm-up was its first reset
    assert same.problems == [] and summarize(same)["engines"]["vllm"]["first_tokens_agree"] == 1.0


def test_there_is_a_program_for_every_peer_and_it_needs_nothing_of_hf_cb():
    assert set(PEERS) <= set(NAMES)
    for file in FOLDER.glob("*.py"):
        imported = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, (ast.Import, ast.ImportFrom))]
        assert not any("hf_cb" in ast.unparse(n) for n in imported), file
    assert all((FOLDER / f"run_{name}.py").is_file() for name in PEERS)


def test_peak_memory():
    pid = psutil.Process().pid
    reset_peak([pid])
    before = peak_rss([pid])
    if before is None:
        pytest.skip("this system tells no peaks")
    block = bytearray(b"x") * 2**26
    assert peak_rss([pid]) > before + len(block) // 2
    del block
    assert peak_rss([2**22 + 1]) is None, "no such process"


class Ours:
    """A stand-in for hf_cb that has its tokens ready."""

    name = "hf_cb"

    def __init__(self, tokens: list[list[int]]) -> None:
        self.tokens = tokens

    def run(self, workload: Workload) -> Measured:
        return Measured(self.name, workload.output_tokens, 1.0, tokens=self.tokens)
