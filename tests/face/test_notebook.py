"""The notebook runs from a clean kernel, and an interrupt in the middle of a cell leaves the next one working.

With HF_CB_NOTEBOOK=1 the outputs in demos/quickstart.ipynb are made anew.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model, make_tokenizer

import hf_cb
from hf_cb.manager.display import EngineDisplay

NOTEBOOK = Path(__file__).parents[2] / "demos" / "quickstart.ipynb"
PATIENCE_S = 120


def execute(path: Path) -> Any:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=PATIENCE_S, kernel_name="python3").execute()
    if os.environ.get("HF_CB_NOTEBOOK"):
        nbformat.write(notebook, path)
    return notebook


def outputs_of(cell: Any) -> str:
    return "".join(str(out.get("text", "")) + str(out.get("data", "")) for out in cell.get("outputs", []))


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_notebook_runs_from_a_clean_kernel() -> None:
    cells = execute(NOTEBOOK).cells
    shown = {
        word: [c for c in cells if word in c.source and c.cell_type == "code"] for word in ("first\n", "alarm", "why")
    }
    everything = "".join(outputs_of(c) for c in cells)
    assert "Paris" in everything and "interrupted" in outputs_of(shown["alarm"][0])
    assert "image/png" in everything, "the picture is missing"
    assert outputs_of(cells[-1]).count("False") == 1


def test_the_committed_notebook_has_its_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = [c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
    silent = [c.source for c in cells if not c.outputs and not c.source.startswith("import signal")]
    assert not silent, "run this test with HF_CB_NOTEBOOK=1"
    assert not any(out.output_type == "error" for c in cells for out in c.outputs)


@pytest.fixture
def kernel() -> Iterator[tuple[Any, Any]]:
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client.manager")
    running, client = manager.start_new_kernel(kernel_name="python3", env={**os.environ, "OMP_NUM_THREADS": "1"})
    yield running, client
    client.stop_channels()
    running.shutdown_kernel(now=True)


def run(client: Any, source: str, meanwhile: Any = lambda: None) -> tuple[str, str]:
    """A cell's status, and all that it printed."""
    asked = client.execute(source)
    meanwhile()
    status = ""
    while not status:
        reply = client.get_shell_msg(timeout=PATIENCE_S)
        status = reply["content"]["status"] if reply["parent_header"].get("msg_id") == asked else ""
    printed = ""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != asked:
            continue
        content = message["content"]
        printed += content.get("text", "") + str(content.get("data", "")) + content.get("ename", "")
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            return status, printed
    raise AssertionError("the kernel said nothing more")


@pytest.mark.slow
def test_an_interrupted_cell_leaves_the_next_one_working(kernel: tuple[Any, Any]) -> None:
    running, client = kernel
    paths = f"import sys; sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(hf_cb.__file__).parents[1])]}\n"
    setup = "import hf_cb\nfrom tiny_models import make_model\nmodel = hf_cb.accelerate(make_model(vocab_size=99))\n"
    assert run(client, paths + setup)[0] == "ok"
    endless = "options = dict(max_new_tokens=200, do_sample=False, eos_token_id=-1)\nprint('started', flush=True)\n"
    endless += "while True:\n    model.generate_batch([[1, 2, 3]] * 4, **options)"

    def interrupt() -> None:
        while "started" not in client.get_iopub_msg(timeout=PATIENCE_S)["content"].get("text", ""):
            continue
        time.sleep(2)
        running.interrupt_kernel()

    status, printed = run(client, endless, interrupt)
    assert status == "error" and "KeyboardInterrupt" in printed
    status, printed = run(client, "print(len(model.generate_batch([[1, 2, 3]], max_new_tokens=5)))")
    assert status == "ok" and printed.startswith("1")


def test_live_shows_answers_in_place_and_returns_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("hf_cb.manager.display._in_place", lambda: shown.append)
    model, tokenizer = make_model(), make_tokenizer()
    hf_cb.accelerate(model, tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    texts = hf_cb.live(model.stream_batch(["one", "<b>"], **options), titles=["<first>"])
    want = [r.text for r in model.generate_batch(["one", "<b>"], **options).values()]
    assert list(texts.values()) == want
    assert "&lt;first&gt;" in shown[-1] and "<first>" not in shown[-1] and "prompt 1" in shown[-1]


def test_a_panel_follows_its_manager_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("hf_cb.manager.display._in_place", lambda: shown.append)
    monkeypatch.setattr("hf_cb.manager.display.PANEL_S", 0.01)
    model = hf_cb.accelerate(make_model())
    with model.continuous_batching_context_manager() as manager:
        display: EngineDisplay = manager.display()
        manager.submit([1, 2, 3], max_new_tokens=4).result()
    display._thread.join(10)
    assert not display._thread.is_alive()
    assert "<b data-name='finished'>1</b>" in shown[-1]
    display.stop()


def test_handles_and_results_have_a_rich_display() -> None:
    model = hf_cb.accelerate(make_model(), make_tokenizer())
    with model.continuous_batching_context_manager() as manager:
        handle = manager.submit("hello", max_new_tokens=4, do_sample=False)
        result = handle.result()
        assert "first token" in handle._repr_html_() and "first token" in result._repr_html_()
        with manager.pause():
            assert "0 tokens so far" in manager.submit("hello", max_new_tokens=4)._repr_html_()
