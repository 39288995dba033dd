"""Ctrl-C anywhere: what was borrowed goes back, and what comes after it works."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from linecache import getline
from typing import Any

import pytest
from tiny_models import generate_alone, greedy, make_model
from transformers.modeling_utils import AttentionInterface

import hf_cb
from hf_cb.attention import interception
from hf_cb.manager import training_mode
from hf_cb.manager.mailbox import Mailbox
from hf_cb.manager.router import OutputQueue

PROMPT = [1, 2, 3]
# Python itself looks for signals at calls and jumps: not before __exit__, or what `finally` calls in C
NEVER = ("with ", "try:", "return True", "return False", "self._ears.discard(", "self._pausers.pop(", "self._news.put(")


@contextmanager
def interrupted_at(number: int, names: set[str], modules: tuple[str, ...] = ("hf_cb",)) -> Iterator[Callable[[], bool]]:
    """Inside, KeyboardInterrupt is raised before the line of this number that functions of these names run. Yields
    whether it was."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_name in names and frame.f_globals["__name__"].startswith(modules):
            line = getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if event == "line" and not line.startswith(NEVER):
                count += 1
                if count == number + 1:
                    raise KeyboardInterrupt
            return trace
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: count > number
    finally:
        sys.settrace(before)


def test_what_a_step_borrows() -> None:
    """Wherever an interrupt comes, nobody is left behind as a user, and the next user gives everything back."""
    model = make_model()
    model.train()
    model.model.layers[1].eval()  # as somebody wants it
    modes = [module.training for module in model.modules()]
    look_up = AttentionInterface.get_interface
    names = {"install", "_wrap_all", "_replace", "_unwrap_all", "enter_eval", "_restore"}

    def borrow() -> None:
        with interception.installed(), training_mode.in_eval(model):
            assert AttentionInterface.get_interface is not look_up and not model.training

    number, more = 0, True
    while more:
        try:
            with interrupted_at(number, names) as has_come:
                borrow()
        except KeyboardInterrupt:
            pass
        assert not interception._users and not training_mode._users.get(model), number
        borrow()
        assert AttentionInterface.get_interface is look_up, number
        assert [module.training for module in model.modules()] == modes, number
        more, number = has_come(), number + 1
    assert number > 40


@pytest.mark.parametrize("place", ["mailbox", "queue"])
def test_waiting_for_news(place: str) -> None:
    """An interrupt is one, nothing stays locked, and nobody is thought to wait."""
    mailbox, outputs = Mailbox([]), OutputQueue()
    waiting, used = {
        "mailbox": (partial(mailbox.wait_for, lambda: False, 0.001), partial(mailbox.add_waker, (None, list))),
        "queue": (partial(outputs.get, None, 0.001), outputs.close),
    }[place]
    names = {"wait_for", "wait", "get", "__enter__", "__exit__", "_release_save", "_acquire_restore"}
    number, more = 0, True
    while more:
        try:
            with interrupted_at(number, names, ("hf_cb", "threading")) as has_come:
                waiting()
        except KeyboardInterrupt:
            assert has_come()
        another = threading.Thread(target=used, daemon=True)
        another.start()
        another.join(5)
        assert not another.is_alive(), number
        outputs.reopen()
        more, number = has_come(), number + 1
    assert number > 8 and not (mailbox._bell._ears or outputs._bell._ears)


def test_a_submission() -> None:
    """A request whose submission is interrupted was never there, or ends with the handle that nobody got."""
    names = {"submit_ids", "_enqueue", "entering", "_enter", "attach", "post_work", "post", "_tell"}
    with hf_cb.accelerate(make_model()).continuous_batching_context_manager() as manager:
        number, more = 0, True
        while more:
            try:
                with interrupted_at(number, names) as has_come:
                    manager.submit(PROMPT, greedy(200))
            except KeyboardInterrupt:
                pass
            assert manager.submit(PROMPT, greedy(2)).result(10).error is None
            end = time.monotonic() + 10
            while len(manager.registry) or manager.engine.has_work:
                assert time.monotonic() < end, number
                time.sleep(0.001)
            assert not manager.router.live() and manager.get_result(timeout=0) is None, number
            more, number = has_come(), number + 1
    assert number > 20


def test_pausing() -> None:
    """Wherever an interrupt comes, also in what `collections` and `threading` do for it, requests go on afterwards."""
    names = {"pause", "wait_for", "__init__", "__missing__", "__iadd__", "update", "_tell", "notify_all", "notify"}
    modules = ("hf_cb.manager.loop", "hf_cb.manager.bell", "collections", "threading")
    with hf_cb.accelerate(make_model()).continuous_batching_context_manager() as manager:
        number, more = 0, True
        while more:
            try:
                with interrupted_at(number, names, modules) as has_come, manager.pause():
                    pass
            except KeyboardInterrupt:
                assert has_come()
            assert len(manager.submit(PROMPT, greedy(2)).result(10).generated_tokens) == 2, number
            more, number = has_come(), number + 1
    assert number > 8


@pytest.mark.parametrize("done", [True, False])
def test_a_handle_that_goes_runs_no_python_code(done: bool) -> None:
    """There an interrupt would be swallowed."""
    calls: list[str] = []
    with hf_cb.accelerate(make_model()).continuous_batching_context_manager() as manager:
        with manager.pause():
            handle = manager.submit(PROMPT, greedy(20))
        if done:
            handle.result(10)
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_qualname) if event == "call" else None)
        try:
            del handle
        finally:
            sys.setprofile(None)
    assert calls == []


def test_a_thread_that_begins_behind_an_interrupted_start(monkeypatch) -> None:
    """`Thread.start` waits until the thread has said that it is there: an interrupt then says nothing of it."""
    may_begin, threads, start = threading.Event(), [], threading.Thread.start

    def interrupted(thread: Any) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        def late(*_: Any) -> None:
            assert may_begin.wait(10)
            begin()

        begin, thread._bootstrap = thread._bootstrap, late
        thread._started.wait = interrupt
        threads.append(thread)
        start(thread)

    llama = make_model()
    want = generate_alone(llama, PROMPT, greedy(20))
    manager = hf_cb.accelerate(llama).init_continuous_batching()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.start()
    llama.train()
    manager.start()
    may_begin.set()
    handle = manager.submit(PROMPT, greedy(20))
    assert handle.result(10).generated_tokens == want
    threads[0].join(10)
    assert manager.is_running() and not llama.training
    assert threads[0] not in interception._users
    assert manager.submit(PROMPT, greedy(20)).result(10).generated_tokens == want
    manager.stop()
    assert llama.training
