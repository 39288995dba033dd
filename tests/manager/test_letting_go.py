"""Whoever lets go of a request, an iteration, a manager or a model leaves nothing behind; and waiting for a place."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest
from tiny_models import greedy, make_model, make_prompts

from hf_cb import EngineConfig
from hf_cb.errors import OptionError, QueueFullError

pytestmark = pytest.mark.usefixtures("patched")
PROMPTS = make_prompts([5, 9, 20])


def wait_until(condition: Any, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.005)
    return bool(condition())


def test_a_dropped_handle_cancels_its_request(manager) -> None:
    handle = manager.submit(PROMPTS[0], greedy(245), num_return_sequences=2, do_sample=True)
    next(iter(handle))
    mailbox = weakref.ref(handle.mailbox)
    del handle
    assert wait_until(lambda: manager.stats().running == 0 and len(manager.registry) == 0)
    assert wait_until(lambda: mailbox() is None), "nobody keeps what nobody can read"
    assert manager.engine.scheduler.running == []


def test_handles_dropped_at_once(manager) -> None:
    """Before the thread has seen the request, and while it is about to."""
    for _ in range(300):
        manager.submit(PROMPTS[0], greedy(245))
    assert wait_until(lambda: len(manager.registry) == 0)
    assert manager.submit(PROMPTS[0], greedy(2)).result(5).error is None


def test_a_dropped_handle_of_a_finished_request(manager) -> None:
    handle = manager.submit(PROMPTS[0], greedy(2))
    handle.result(5)
    del handle
    gc.collect()
    assert not manager.loop.dropped


def test_a_handle_is_held_by_its_iteration(manager) -> None:
    assert sum(len(d.token_ids) for d in manager.submit(PROMPTS[0], greedy(30))) == 30


def test_an_abandoned_iteration_cancels(manager) -> None:
    for _ in manager.submit(PROMPTS[0], greedy(245)):
        break
    assert wait_until(lambda: len(manager.registry) == 0)


def test_a_left_iteration_of_a_held_handle_does_not(manager) -> None:
    handle = manager.submit(PROMPTS[0], greedy(30))
    for _ in handle:
        break
    assert len(handle.result(5).generated_tokens) == 30


def test_an_abandoned_async_iteration_cancels(manager) -> None:
    async def main() -> None:
        async for _ in manager.submit(PROMPTS[0], greedy(245)):
            break
        task = asyncio.ensure_future(collect())
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def collect() -> None:
        await manager.submit(PROMPTS[1], greedy(245))

    asyncio.run(main())
    assert wait_until(lambda: len(manager.registry) == 0)


def test_handles_dropped_while_locks_are_held(manager) -> None:
    """A collection may come at any moment, also where one of our locks is held by this very thread."""
    for lock in (manager.registry._lock, manager.loop.lock, manager.router._lock, manager.router.queue._lock):
        handle = manager.submit(PROMPTS[0], greedy(245))
        with lock:
            del handle
            gc.collect()
    assert wait_until(lambda: len(manager.registry) == 0)


def test_waiting_where_it_would_never_end(manager) -> None:
    errors: list[Exception] = []

    def check(ids: Any, scores: Any) -> Any:
        for wait in (handle.result, lambda: manager.pause().__enter__()):
            try:
                wait()
            except RuntimeError as error:
                errors.append(error)
        return scores

    with manager.pause():
        handle = manager.submit(PROMPTS[0], greedy(245))
        checked = manager.submit(PROMPTS[1], greedy(1), logits_processor=[check])
        with pytest.raises(RuntimeError, match="Inside pause"):
            handle.result()
    checked.result(5)
    assert len(errors) == 2 and all("cannot" in str(error) for error in errors)
    handle.cancel()


def test_interrupted_pauses_leave_the_pool_whole(manager, monkeypatch) -> None:
    handles = [manager.submit(p, greedy(200)) for p in PROMPTS * 3]
    wait_for, me = manager.loop._quiet.wait_for, threading.get_ident()

    def interrupted(*args: Any) -> Any:
        if threading.get_ident() == me:
            raise KeyboardInterrupt
        return wait_for(*args)

    monkeypatch.setattr(manager.loop._quiet, "wait_for", interrupted)
    for _ in range(200):
        with pytest.raises(KeyboardInterrupt), manager.pause():
            raise AssertionError("never entered")
    monkeypatch.undo()
    assert all(h.result(20).error is None for h in handles)
    assert wait_until(lambda: len(manager.registry) == 0)
    with manager.pause():
        manager.engine.check_idle()


def test_waiting_for_a_place(patched, shared_llama) -> None:
    config = EngineConfig(max_queue_size=1, max_num_seqs=1, queue_wait=30.0)
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        handles = [manager.submit(PROMPTS[0], greedy(20)) for _ in range(5)]  # each waits for its place
        assert all(h.result(5).error is None for h in handles)
        running, queued = (manager.submit(PROMPTS[0], greedy(245)) for _ in range(2))
        began = time.monotonic()
        with pytest.raises(QueueFullError, match="1 requests wait after 0.1 s and max_queue_size=1"):
            manager.submit(PROMPTS[0], greedy(2), queue_wait=0.1)
        assert time.monotonic() - began >= 0.1
        with pytest.raises(QueueFullError, match="1 requests wait and"):
            manager.submit(PROMPTS[0], greedy(2), queue_wait=0)
        assert running.cancel() is None and queued.cancel() is None


def test_waiting_for_a_place_inside_a_pause(patched, shared_llama) -> None:
    config = EngineConfig(max_queue_size=1)
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            handle = manager.submit(PROMPTS[0], greedy(2))
            with pytest.raises(RuntimeError, match="Inside pause"):
                manager.submit(PROMPTS[0], greedy(2), queue_wait=float("inf"))
        assert handle.result(10).error is None and not manager.registry


def test_waiting_for_a_place_ends_with_the_manager(patched, shared_llama) -> None:
    from hf_cb.errors import ManagerStoppedError

    manager = shared_llama.init_continuous_batching(continuous_batching_config=EngineConfig(max_queue_size=1))
    manager.start()
    errors: list[Exception] = []
    with manager.pause():
        handle = manager.submit(PROMPTS[0], greedy(2))

        def submit() -> None:
            try:
                manager.submit(PROMPTS[0], greedy(2), queue_wait=60)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=submit)
        thread.start()
        stopping = threading.Thread(target=manager.stop, kwargs={"hard_stop": True})
        stopping.start()
        assert wait_until(lambda: manager.loop._stopping == "hard")
    stopping.join(5)
    thread.join(5)
    assert not thread.is_alive() and [type(e) for e in errors] == [ManagerStoppedError]
    assert handle.done


def test_too_long_in_the_queue(patched, shared_llama) -> None:
    config = EngineConfig(max_num_seqs=1, max_queue_time=0.05)
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        first = manager.submit(PROMPTS[0], greedy(245))
        next(iter(first))
        late = manager.submit(PROMPTS[1], greedy(2))
        patient = manager.submit(PROMPTS[1], greedy(2), max_queue_time=60)
        result = late.result(5)
        assert result.finish_reason == "timeout" and result.generated_tokens == [] and result.metrics.queue_s >= 0.05
        first.cancel()
        assert patient.result(5).finish_reason == "length"
        with pytest.raises(OptionError, match="max_queue_time"):
            manager.submit(PROMPTS[0], greedy(2), max_queue_time=-1)


def test_a_preempted_request_is_not_in_the_queue() -> None:
    """It has started: the time in the queue is over for good."""
    model = make_model()
    config = EngineConfig(block_size=4, num_blocks=15, max_queue_time=0.5)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            handles = [manager.submit(p, greedy(30)) for p in make_prompts([20, 19])]
        results = [h.result(20) for h in handles]
    assert [r.finish_reason for r in results] == ["length"] * 2
    assert sum(r.metrics.preemptions for r in results) > 0


def test_a_forgotten_manager_and_its_model_go() -> None:
    model = make_model()
    manager = model.init_continuous_batching()
    manager.start()
    manager.submit(PROMPTS[0], greedy(3)).result(5)
    thread, gone = manager.loop._thread, weakref.ref(model)
    del manager, model
    assert wait_until(lambda: gone() is None and not thread.is_alive())


def test_a_forgotten_manager_leaves_the_model_as_it_was() -> None:
    model = make_model().train()
    manager = model.init_continuous_batching()
    manager.start()
    thread = manager.loop._thread
    assert not model.training
    del manager
    assert wait_until(lambda: not thread.is_alive() and model.training)


def test_a_forgotten_manager_finishes_what_somebody_waits_for() -> None:
    model = make_model()
    manager = model.init_continuous_batching()
    manager.start()
    handle, thread = manager.submit(PROMPTS[0], greedy(60)), manager.loop._thread
    del manager
    gc.collect()
    assert len(handle.result(10).generated_tokens) == 60
    del handle
    assert wait_until(lambda: not thread.is_alive())


def test_a_model_with_a_kept_manager_goes() -> None:
    model = make_model()
    model.generate_batch(PROMPTS, greedy(2), persistent_manager=True)
    gone = weakref.ref(model)
    del model
    assert wait_until(lambda: gone() is None and not any(t.name == "hf_cb" for t in threading.enumerate()))


def test_kept_managers_leave_nothing_behind() -> None:
    model = make_model()
    before = len(weakref.finalize._registry)
    for _ in range(5):
        model.generate_batch(PROMPTS, greedy(2), persistent_manager=True)
    assert len(weakref.finalize._registry) <= before + 2
    model.destroy_cached_continuous_batching_manager()


def test_handlers_of_requests_that_never_run(manager) -> None:
    """A registered handler is told, or forgotten."""
    told: list[Any] = []

    async def main() -> None:
        for i in range(20):
            manager.register_result_handler(f"bad{i}", told.append)
            with pytest.raises(ValueError):
                manager.add_request([], request_id=f"bad{i}")
        manager.register_result_handler("late", told.append)
        await asyncio.to_thread(manager.stop)
        assert manager.add_request(PROMPTS[0], request_id="late") is None
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert [o.request_id for o in told] == ["late"] and "stopped" in told[0].error
    assert not manager.router._handlers


def test_many_managers_and_models() -> None:
    models = [make_model(seed=i) for i in range(3)]
    managers = [m.init_continuous_batching() for m in (*models, models[0])]
    for manager in managers:
        manager.start()
    handles = [m.submit(p, greedy(10)) for p in PROMPTS for m in managers]
    tokens = [h.result(20).generated_tokens for h in handles]
    assert tokens[0::4] == tokens[3::4] and tokens[0::4] != tokens[1::4]
    for manager in managers:
        manager.stop()
