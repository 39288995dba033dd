"""A stream that nobody reads to its end closes wherever it goes: it waits for nobody there, and no others suffer."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from typing import Any

import pytest
from running import wait_until
from tiny_models import greedy, make_model, make_prompts

from hf_cb.manager.kept import kept_manager

pytestmark = pytest.mark.usefixtures("patched")
PROMPTS = make_prompts([5, 9, 20])


def kept(model: Any) -> Any:
    """A manager that its calls share."""
    model.generate_batch(PROMPTS[:1], greedy(1), persistent_manager=True)
    return kept_manager(model)


def no_thread_is_left() -> bool:
    return not any(thread.name == "hf_cb" for thread in threading.enumerate())


@pytest.mark.parametrize("name", ["session", "training_mode", "switching"])
def test_in_a_thread_that_holds_locks(name: str) -> None:
    lock = importlib.import_module(f"hf_cb.manager.{name}")._lock
    stream = make_model().stream_batch(PROMPTS, greedy(245))
    next(stream)
    with lock:
        del stream
        gc.collect()
    assert wait_until(no_thread_is_left)


@pytest.mark.parametrize("name", ["session", "registry"])
def test_while_another_thread_holds_locks(name: str) -> None:
    """Which may wait for one of those that this thread has: a collection comes anywhere."""
    model = make_model()
    manager = kept(model)
    stream = [model.stream_batch(PROMPTS, greedy(245))]
    next(stream[0])
    lock = {"session": importlib.import_module("hf_cb.manager.session")._lock, "registry": manager.registry._lock}[name]
    with lock:
        closing = threading.Thread(target=stream.clear, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    assert wait_until(no_thread_is_left) and not manager.registry
    manager.engine.check_idle()


@pytest.mark.parametrize("name", ["attention.interception", "manager.training_mode", "manager.running"])
def test_starting_waits_for_no_lock_under_the_loops_own(name: str) -> None:
    """Whoever holds it may be closing a stream, which takes the loop's."""
    manager, waits_in = make_model().init_continuous_batching(), {"install", "enter_eval", "note_running"}
    with importlib.import_module(f"hf_cb.{name}")._lock:
        starting = threading.Thread(target=manager.start, daemon=True)
        starting.start()
        assert wait_until(lambda: sys._current_frames()[starting.ident].f_code.co_name in waits_in)
        assert manager.loop.lock.acquire(timeout=10)
        manager.loop.lock.release()
    starting.join(10)
    assert manager.is_running()
    manager.stop()


def test_beside_other_calls() -> None:
    """They go on, and the last of them ends the manager."""
    model = make_model()
    manager = kept(model)
    left, other = (model.stream_batch(PROMPTS, greedy(100)) for _ in range(2))
    next(left)
    tokens = next(other).token_ids
    left.close()
    assert len(tokens) + sum(len(delta.token_ids) for delta in other) == 300
    assert wait_until(no_thread_is_left) and not manager.registry


def test_inside_a_pause() -> None:
    """The manager ends when the pause does."""
    model = make_model()
    manager = kept(model)
    left = model.stream_batch(PROMPTS, greedy(245))
    next(left)
    with manager.pause():
        left.close()
        with pytest.raises(RuntimeError, match="inside pause"):
            manager.start()
    assert wait_until(no_thread_is_left) and not manager.registry
    assert len(model.generate_batch(PROMPTS, greedy(2))) == 3


def test_inside_a_pause_a_stream_does_not_wait() -> None:
    model = make_model()
    kept(model)
    with model.continuous_batching_context_manager() as manager:
        with manager.pause(), pytest.raises(RuntimeError, match="Inside pause"):
            list(model.stream_batch(PROMPTS, greedy(2)))
        assert sum(len(delta.token_ids) for delta in model.stream_batch(PROMPTS, greedy(2))) == 6
