"""The manager: handles from threads and event loops, transformers' calls, stopping, pausing, dying."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import pytest
from running import held_after
from tiny_models import generate_alone, greedy, make_prompts

from hf_cb import EngineConfig, ManagerStoppedError, QueueFullError, RequestCancelledError

pytestmark = pytest.mark.usefixtures("patched")
PROMPTS = make_prompts([5, 12, 3])


@pytest.fixture
def manager(shared_llama):
    config = EngineConfig(block_size=4)
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        yield manager
        for request in list(manager.registry._live.values()):
            manager.cancel_request(request.request_id)
        manager.stop()
    manager.engine.check_idle()
    assert not manager.registry._live and not manager.router.live() and not manager.router._handlers


def test_handles_from_many_threads(shared_llama, manager) -> None:
    want = [generate_alone(shared_llama, p, greedy()) for p in PROMPTS]
    wrong = []

    def ask(i: int) -> None:
        for turn in range(5):
            handle = manager.submit(PROMPTS[(i + turn) % 3], greedy())
            streamed = [t for delta in handle for t in delta.token_ids]
            if not streamed == handle.result().generated_tokens == want[(i + turn) % 3]:
                wrong.append((i, turn))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_handles_from_an_event_loop(shared_llama, manager) -> None:
    want = [generate_alone(shared_llama, p, greedy()) for p in PROMPTS]

    async def ask(i: int) -> tuple[list[int], list[int]]:
        handle = manager.submit(PROMPTS[i], greedy())
        streamed = [t async for delta in handle for t in delta.token_ids]
        return streamed, (await handle).generated_tokens

    async def main() -> list:
        return await asyncio.gather(*(ask(i % 3) for i in range(9)))

    for _ in range(2):  # two event loops, one after the other
        assert asyncio.run(main()) == [(want[i % 3], want[i % 3]) for i in range(9)]


def test_two_readers_of_one_handle_both_see_everything(manager) -> None:
    handle = manager.submit(PROMPTS[0], greedy(30))
    first, second = ([t for d in handle for t in d.token_ids] for _ in range(2))
    assert first == second == handle.result().generated_tokens


def test_a_slow_reader_gets_merged_deltas(manager) -> None:
    handle = manager.submit(PROMPTS[0], greedy(50))
    handle.result()
    deltas = list(handle)
    assert len(deltas) == 1 and len(deltas[0].token_ids) == 50 and deltas[0].finish_reason == "length"


def test_result_times_out_and_the_request_goes_on(manager) -> None:
    handle = manager.submit(PROMPTS[0], greedy(200))
    with pytest.raises(TimeoutError, match="req_"):
        handle.result(timeout=0.001)
    assert len(handle.result().generated_tokens) == 200


def test_cancel_before_during_after_and_twice(shared_llama, manager) -> None:
    with manager.pause():
        waiting = manager.submit(PROMPTS[0], greedy(200))
        waiting.cancel()
    assert waiting.result(5).finish_reason == "cancelled" and waiting.result().generated_tokens == []
    may_go_on = held_after(manager.engine, 6)
    running = manager.submit(PROMPTS[0], greedy(240))
    next(iter(running))
    running.cancel()
    running.cancel()
    may_go_on.set()
    result = running.result(5)
    assert result.finish_reason == "cancelled" and 0 < len(result.generated_tokens) < 240
    assert (
        result.generated_tokens == generate_alone(shared_llama, PROMPTS[0], greedy(240))[: len(result.generated_tokens)]
    )
    running.cancel()
    assert running.result().finish_reason == "cancelled"


def test_cancelling_a_request_with_several_sequences(manager) -> None:
    may_go_on = held_after(manager.engine, 6)
    handle = manager.submit(PROMPTS[0], greedy(200, do_sample=True, num_return_sequences=3))
    next(iter(handle))
    handle.cancel()
    may_go_on.set()
    assert [r.finish_reason for r in handle.results(5)] == ["cancelled"] * 3


def test_deadline_and_max_time(manager) -> None:
    late = manager.submit(PROMPTS[0], greedy(245), deadline=1e-4)
    assert late.result(5).finish_reason == "timeout"
    slow = manager.submit(PROMPTS[0], greedy(245), max_time=1e-4)
    assert slow.result(5).finish_reason == "timeout" and slow.result().error is None


def test_queue_limit(shared_llama) -> None:
    config = EngineConfig(max_queue_size=2)
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        with manager.pause():
            handles = [manager.submit(p, greedy()) for p in PROMPTS[:2]]
            with pytest.raises(QueueFullError, match="2 requests wait and max_queue_size=2"):
                manager.submit(PROMPTS[2], greedy())
        assert all(h.result().error is None for h in handles)
        assert manager.submit(PROMPTS[2], greedy()).result().error is None


def test_transformers_calls(shared_llama, manager) -> None:
    want = {f"req_{i}": generate_alone(shared_llama, p, greedy()) for i, p in enumerate(PROMPTS)}
    ids = manager.add_requests(PROMPTS, max_new_tokens=12, eos_token_id=-1)
    assert ids == list(want)
    last = manager.get_result(request_id=ids[2], timeout=5)
    assert last.request_id == ids[2] and last.generated_tokens == want[ids[2]]
    others = {r.request_id: r.generated_tokens for r in (manager.get_result(timeout=5) for _ in range(2))}
    assert others == {i: want[i] for i in ids[:2]}
    assert manager.get_result(timeout=0.01) is None
    streaming = manager.add_request(PROMPTS[0], max_new_tokens=12, streaming=True, eos_token_id=-1)
    outputs = list(manager.request_id_iter(streaming))
    assert [o.is_finished() for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert all(a.generated_tokens == b.generated_tokens[: len(a.generated_tokens)] for a, b in pairwise(outputs))
    assert outputs[-1].generated_tokens == want["req_0"]


def test_iterating_over_a_manager_ends_when_it_stops(manager) -> None:
    manager.add_requests(PROMPTS, max_new_tokens=3)
    manager.stop()
    assert len(list(manager)) == 3


def test_a_handler_registered_late_still_gets_the_early_output(shared_llama, manager) -> None:
    want = generate_alone(shared_llama, PROMPTS[0], greedy())

    async def main(streaming: bool, wait: float) -> list:
        outputs: list = []
        done = asyncio.Event()
        request_id = manager.add_request(PROMPTS[0], max_new_tokens=12, streaming=streaming, eos_token_id=-1)
        await asyncio.sleep(wait)

        def take(output) -> None:
            outputs.append(output)
            if output.is_finished():
                done.set()

        manager.register_result_handler(request_id, take)
        await asyncio.wait_for(done.wait(), 5)
        return outputs

    for wait in (0.0, 0.3):
        assert len(asyncio.run(main(False, wait))) == 1
        outputs = asyncio.run(main(True, wait))
        assert outputs[-1].generated_tokens == want
        lengths = [len(o.generated_tokens) for o in outputs]
        assert lengths == sorted(lengths) and lengths[0] == 1


def test_handles_never_enter_the_shared_queue(manager) -> None:
    manager.submit(PROMPTS[0], greedy()).result()
    assert manager.get_result(timeout=0.01) is None


def test_stopping_finishes_what_was_accepted(manager) -> None:
    handles = [manager.submit(p, greedy(50)) for p in PROMPTS]
    manager.stop()
    assert all(h.result(0).finish_reason == "length" for h in handles)
    assert not manager.is_running()
    with pytest.raises(ManagerStoppedError, match="stopped"):
        manager.submit(PROMPTS[0], greedy())
    assert manager.add_request(PROMPTS[0]) is None


def test_a_hard_stop_drops_requests_with_an_error(manager) -> None:
    may_go_on = held_after(manager.engine, 6)
    handles = [manager.submit(p, greedy(240)) for p in PROMPTS]
    manager.stop(block=False, hard_stop=True)
    may_go_on.set()
    for handle in handles:
        with pytest.raises(RequestCancelledError, match="stopped before"):
            handle.result(1)


def test_a_stopped_manager_starts_again_and_a_destroyed_one_does_not(manager) -> None:
    first = manager.submit(PROMPTS[0], greedy()).result()
    manager.stop()
    manager.start()
    assert manager.submit(PROMPTS[0], greedy()).result().generated_tokens == first.generated_tokens
    manager.destroy()
    with pytest.raises(ManagerStoppedError, match="destroyed"):
        manager.start()


def test_requests_before_the_start_wait_for_it(shared_llama) -> None:
    manager = shared_llama.init_continuous_batching()
    handle = manager.submit(PROMPTS[0], greedy())
    assert not handle.wait(0.05)
    manager.start()
    assert handle.result(5).error is None
    manager.destroy()


def test_pause_holds_the_engine_and_lets_several_in(manager) -> None:
    handle = manager.submit(PROMPTS[0], greedy(245))
    inside = threading.Barrier(3)

    def hold() -> None:
        with manager.pause():
            inside.wait(5)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for t in threads:
        t.start()
    with manager.pause():
        steps = manager.stats().steps
        time.sleep(0.05)
        assert manager.stats().steps == steps
        inside.wait(5)
        with pytest.raises(RuntimeError, match="inside pause"):
            manager.stop()
    for t in threads:
        t.join()
    assert handle.result(10).finish_reason == "length"


def test_pausing_a_stopped_manager_is_an_error(manager) -> None:
    manager.stop()
    with pytest.raises(RuntimeError, match="running manager"), manager.pause():
        pass


def test_if_the_loop_dies_every_waiter_wakes_with_the_cause(shared_llama, monkeypatch) -> None:
    with shared_llama.continuous_batching_context_manager() as manager:
        may_go_on = held_after(manager.engine, 6)
        with manager.pause():
            streaming = manager.add_request(PROMPTS[1], max_new_tokens=200, streaming=True)
            handle = manager.submit(PROMPTS[0], greedy(245))
        next(iter(handle))
        monkeypatch.setattr(manager.engine.scheduler, "plan", lambda *_, **__: 1 / 0)
        may_go_on.set()
        began = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            handle.result(10)
        assert "ZeroDivisionError" in list(manager.request_id_iter(streaming))[-1].error
        assert time.monotonic() - began < 1
        with pytest.raises(ManagerStoppedError, match="ZeroDivisionError") as caught:
            manager.submit(PROMPTS[0], greedy())
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert isinstance(manager.background_thread_status.fatal_error, ZeroDivisionError)
        assert manager.get_result(timeout=5) is None
    manager.engine.kv.pool.check_integrity()


def test_stats_and_trace(manager) -> None:
    assert manager.submit(PROMPTS[0], greedy(5)).result().error is None
    stats, trace = manager.stats(), manager.trace()
    assert (stats.running, stats.waiting, stats.finished, stats.tokens, stats.blocks_held) == (0, 0, 1, 5, 0)
    assert len(trace) == stats.steps == 5
    assert [r.decode_tokens for r in trace] == [0, 1, 1, 1, 1] and trace[0].prefill_tokens == 5
    assert all(min(r.plan_s, r.build_s, r.forward_s, r.sample_s, r.commit_s) > 0 for r in trace)


def test_prefix_cache_can_be_reset(manager) -> None:
    manager.submit(PROMPTS[1], greedy(2)).result()
    assert manager.submit(PROMPTS[1], greedy(2)).result().metrics.cached_tokens == 8
    manager.reset_prefix_cache()
    assert manager.submit(PROMPTS[1], greedy(2)).result().metrics.cached_tokens == 0


def test_a_kept_manager_refuses_other_options(shared_llama) -> None:
    shared_llama.generate_batch(PROMPTS, greedy(2), EngineConfig(block_size=4), persistent_manager=True)
    with pytest.raises(ValueError, match="destroy_cached"):
        shared_llama.generate_batch(PROMPTS, greedy(2), EngineConfig(block_size=8))
    shared_llama.destroy_cached_continuous_batching_manager()
    shared_llama.destroy_cached_continuous_batching_manager()
    assert len(shared_llama.generate_batch(PROMPTS, greedy(2), EngineConfig(block_size=8))) == 3
