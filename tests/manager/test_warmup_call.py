"""`manager.warmup()`: done by the thread that steps, before any request, and waited for where there is one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tiny_models import greedy, make_prompts

from hf_cb.models.paged import PagedModel

pytestmark = pytest.mark.usefixtures("patched")
PROMPT = make_prompts([5])[0]


@pytest.fixture
def by_thread(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that have warmed up."""
    seen: list[str] = []
    monkeypatch.setattr(PagedModel, "warm_up", lambda self: seen.append(threading.current_thread().name))
    return seen


def test_it_returns_when_it_is_done(by_thread: list[str], manager: Any) -> None:
    assert by_thread == ["hf_cb"], "a session has done it at its start"
    manager.warmup()
    assert by_thread == ["hf_cb"] * 2
    assert len(manager.submit(PROMPT, greedy(3)).result(10).generated_tokens) == 3


def test_before_the_start_it_waits_for_it(by_thread: list[str], shared_llama: Any) -> None:
    manager = shared_llama.init_continuous_batching()
    manager.warmup()
    assert by_thread == []
    manager.start()
    assert manager.submit(PROMPT, greedy(3)).result(10).error is None
    manager.stop(block=True)
    assert by_thread == ["hf_cb"]


def test_a_session_may_do_without(by_thread: list[str], shared_llama: Any) -> None:
    with shared_llama.continuous_batching_context_manager(warmup=False):
        assert by_thread == []


def test_where_it_would_wait_for_ever_it_is_an_error(manager: Any) -> None:
    with manager.pause(), pytest.raises(RuntimeError, match="Inside pause"):
        manager.warmup()


def test_a_dead_thread_is_not_waited_for(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PagedModel) -> None:
        raise RuntimeError("out of everything")

    monkeypatch.setattr(PagedModel, "warm_up", fail)
    manager.warmup()
    assert "out of everything" in str(manager.background_thread_status.fatal_error)
