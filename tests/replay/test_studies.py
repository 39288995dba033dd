"""docs/make_studies.py runs: its pages are made from real runs of a tiny model."""

import importlib.util
from pathlib import Path

import pytest
from tiny_models import make_model, make_tokenizer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
SCRIPT = Path(__file__).parents[2] / "docs" / "make_studies.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("make_studies", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_both_kinds_of_study_write_a_page_and_a_picture(script, tmp_path, monkeypatch):
    make_model("Llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(script, "POLICIES", {"continuous": "policy=fifo", "prompts": "policy=prefill_first"})
    monkeypatch.setattr(script, "CHUNKS", (8, 64))
    args = ["policies-low", "prefill-chunk", "--rounds", "2", "--seconds", "0.05"]
    assert script.main([*args, "--folder", str(tmp_path), "--model", str(tmp_path / "model")]) == 0
    page = (tmp_path / "policies-low.md").read_text()
    assert "| continuous | " in page and "- prompts against continuous: " in page and "| prompts | " in page
    page = (tmp_path / "prefill-chunk.md").read_text()
    assert "| 8 | " in page and "| 64 | " in page and "![How much" in page
    for name in ("policies-low", "prefill-chunk"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_an_unknown_study_is_named(script, tmp_path, capsys):
    make_model("Llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert script.main(["policy", "--model", str(tmp_path)]) == 2
    assert "policies-low" in capsys.readouterr().err
