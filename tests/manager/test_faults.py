"""What goes wrong around a running manager: nobody waits for ever, and nobody gets a wrong answer without a word."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from running import held_after
from tiny_models import generate_alone, greedy, make_prompts

import hf_cb
from hf_cb import EngineConfig, ManagerStoppedError, RequestCancelledError
from hf_cb.manager import training_mode

pytestmark = pytest.mark.usefixtures("patched")
PROMPTS = make_prompts([5, 12, 3])


def test_attention_that_stops_arriving_is_an_error(llama, monkeypatch) -> None:
    with llama.continuous_batching_context_manager() as manager:
        manager.submit(PROMPTS[0], greedy(2)).result()
        monkeypatch.setattr(
            llama.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
        )
        with pytest.raises(RuntimeError, match="3 of 4 attention calls"):
            manager.submit(PROMPTS[1], greedy(2)).result()


def test_model_to_another_dtype_is_named(llama) -> None:
    with llama.continuous_batching_context_manager() as manager:
        manager.submit(PROMPTS[0], greedy(2)).result()
        with manager.pause():
            llama.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="bfloat16.*float32.*new manager"):
            manager.submit(PROMPTS[1], greedy(2)).result()


@pytest.mark.parametrize("how", ["dies", "hard stop"])
def test_pause_returns_when_the_loop_ends_meanwhile(manager, monkeypatch, how: str) -> None:
    deliver = manager.loop._deliver
    monkeypatch.setattr(manager.loop, "_deliver", lambda *args: (time.sleep(0.05), deliver(*args)))
    handles = [manager.submit(p, greedy(245)) for p in PROMPTS]
    next(iter(handles[0]))
    if how == "dies":
        monkeypatch.setattr(manager.engine.scheduler, "plan", lambda *_, **__: 1 / 0)
    else:
        manager.stop(block=False, hard_stop=True)
    entered = threading.Event()

    def pause() -> None:
        try:
            with manager.pause():
                entered.set()
        except RuntimeError:  # it had ended before
            entered.set()

    threading.Thread(target=pause, daemon=True).start()
    assert entered.wait(5)
    for handle in handles:
        with pytest.raises((ZeroDivisionError, RequestCancelledError)):
            handle.result(5)


def test_an_interrupt_while_waiting_for_a_pause_leaves_none_behind(manager, monkeypatch) -> None:
    wait_for, me = manager.loop._quiet.wait_for, threading.get_ident()

    def interrupted(*args):
        if threading.get_ident() == me:
            raise KeyboardInterrupt
        return wait_for(*args)

    with monkeypatch.context() as patch:
        patch.setattr(manager.loop._quiet, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), manager.pause():
            raise AssertionError("never entered")
    assert manager.submit(PROMPTS[0], greedy(3)).result(5).error is None


def test_training_inside_a_pause_after_train(llama, monkeypatch) -> None:
    """As the message of the timeout advises, also if `eval()` comes only behind it; other requests to the loop are
    heard meanwhile too."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(training_mode, "time", clock)
    looked = threading.Event()
    config = EngineConfig(train_mode_timeout=1)
    with llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        may_go_on = held_after(manager.engine, 3)
        handle = manager.submit(PROMPTS[0], greedy(100))
        other = manager.submit(PROMPTS[1], greedy(100))
        llama.train()
        other.cancel()
        may_go_on.set()
        assert other.result(5).finish_reason == "cancelled"
        with manager.pause():
            clock.now += 2
        manager.loop.post(partial(manager.loop.post, looked.set))  # the second is read after a look at the model
        assert looked.wait(5)
        llama.eval()
        assert handle.result(5).error is None


@pytest.mark.parametrize("broken", ["leave_eval", "drop_all"])
def test_a_failing_clean_up_still_wakes_everybody(llama, monkeypatch, broken: str) -> None:
    from hf_cb.manager import thread

    def fails(*_):
        raise OSError("clean-up")

    with llama.continuous_batching_context_manager() as manager:
        if broken == "leave_eval":
            monkeypatch.setattr(thread, "leave_eval", fails)
        else:
            monkeypatch.setattr(manager.engine, "drop_all", fails)
        may_go_on = held_after(manager.engine, 6)
        handle = manager.submit(PROMPTS[0], greedy(245))
        next(iter(handle))
        monkeypatch.setattr(manager.engine.scheduler, "plan", lambda *_, **__: 1 / 0)
        may_go_on.set()
        with pytest.raises(ZeroDivisionError):
            handle.result(5)
    monkeypatch.undo()
    thread.leave_eval(llama, manager.loop._thread) if broken == "leave_eval" else None


def test_cancelling_by_an_id_that_comes_later(shared_llama) -> None:
    manager = shared_llama.init_continuous_batching()
    manager.cancel_request("later")
    handle, other = manager.submit(PROMPTS[0], greedy(3), request_id="later"), manager.submit(PROMPTS[1], greedy(3))
    manager.start()
    assert handle.result(5).error is None and other.result(5).error is None
    manager.destroy()


def test_cancels_race_with_submissions(manager) -> None:
    stop = threading.Event()

    def cancel() -> None:
        while not stop.wait(1e-4):  # a thread that never lets go of the GIL would be another test
            manager.cancel_request("x")

    thread = threading.Thread(target=cancel, daemon=True)
    thread.start()
    for _ in range(50):
        assert manager.submit(PROMPTS[0], greedy(3), request_id="x").result(5).finish_reason in ("cancelled", "length")
    stop.set()
    thread.join()


def test_a_manager_that_was_never_started(shared_llama) -> None:
    manager = shared_llama.init_continuous_batching()
    handle = manager.submit(PROMPTS[0], greedy(2))
    assert manager.get_result() is None
    manager.destroy()
    with pytest.raises(RequestCancelledError, match="before it was started"):
        handle.result(5)


def test_start_right_after_stop(manager) -> None:
    first = manager.submit(PROMPTS[0], greedy(100))
    manager.stop(block=False)
    manager.start()
    assert manager.submit(PROMPTS[1], greedy(2)).result(5).error is None and first.result(5).error is None


def test_a_hard_stop_is_not_taken_back(manager) -> None:
    handle = manager.submit(PROMPTS[0], greedy(245))
    with manager.loop.lock:
        manager.stop(block=False, hard_stop=True)
        manager.stop(block=False)
    with pytest.raises(RequestCancelledError):
        handle.result(5)


def test_sessions_on_a_kept_manager_do_not_end_each_other(shared_llama) -> None:
    want = [generate_alone(shared_llama, p, greedy(4)) for p in PROMPTS]

    def ask(_):
        results = shared_llama.generate_batch(PROMPTS, greedy(4), persistent_manager=True)
        return [r.generated_tokens for r in results.values()]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(24))) == [want] * 24
    shared_llama.destroy_cached_continuous_batching_manager()


def test_a_kept_managers_options_hold_for_later_calls(shared_llama) -> None:
    config = EngineConfig(return_logprobs=True)
    shared_llama.generate_batch(PROMPTS, greedy(2), config, persistent_manager=True)
    (result,) = shared_llama.generate_batch(PROMPTS[:1], greedy(2), persistent_manager=True).values()
    assert len(result.logprobs) == 2
    hf_cb.unpatch()
    assert not hasattr(shared_llama, "_cached_continuous_batching_manager")


EXIT_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import hf_cb
from tiny_models import greedy, make_model, make_prompts
model = make_model("Llama")
hf_cb.patch()
if {how!r} == "busy":
    manager = model.init_continuous_batching()
    manager.start()
    handles = [manager.submit(p, greedy(240)) for p in make_prompts([5, 9, 30])]
    next(iter(handles[0]))
else:
    stream = model.stream_batch(make_prompts([5, 9, 30]), greedy(240))
    next(stream)
"""


@pytest.mark.parametrize("how", ["busy", "stream"])
def test_the_interpreter_exits_cleanly_with_a_busy_manager(how: str) -> None:
    script = EXIT_SCRIPT.format(tests=os.path.dirname(os.path.dirname(__file__)), how=how)
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_told(manager) -> None:
    manager.submit(PROMPTS[0], greedy(2)).result()
    child = os.fork()
    if child == 0:
        try:
            manager.submit(PROMPTS[0], greedy(2))
        except ManagerStoppedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
