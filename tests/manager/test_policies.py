"""Policies behind the manager: while one holds requests back the thread sleeps, and any news wakes it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import generate_alone, greedy, make_model, make_prompts

import hf_cb
from hf_cb import ContinuousBatchingManager, EngineConfig, OptionError, RequestCancelledError
from hf_cb.policies import POLICIES, Policy, Situation, Static

pytestmark = pytest.mark.usefixtures("patched")
PROMPTS = make_prompts([5, 12, 3])
LONG = 3600.0  # seconds that no test waits


class Watch:
    """How often an engine was asked to step, and whether it was found holding requests back."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self.steps, self.held = 0, threading.Event()
        self._usual, self._engine = manager.engine.step, manager.engine
        manager.engine.step = self._step

    def _step(self) -> Any:
        self.steps += 1
        updates = self._usual()
        if self._engine.scheduler.held_until is not None:
            self.held.set()
        return updates


@contextmanager
def holding(model: Any, policy: Any) -> Iterator[tuple[ContinuousBatchingManager, Watch]]:
    config = EngineConfig(policy=policy, block_size=4)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        yield manager, Watch(manager)
        manager.stop()
    manager.engine.check_idle()


def want(model: Any, i: int) -> list[int]:
    return generate_alone(model, PROMPTS[i], greedy())


def test_the_last_one_that_is_needed_wakes_a_static_batch(shared_llama) -> None:
    with holding(shared_llama, Static(3, quiet=LONG)) as (manager, watch):
        handles = [manager.submit(PROMPTS[0], greedy())]
        assert watch.held.wait(30)
        handles += [manager.submit(p, greedy()) for p in PROMPTS[1:]]
        assert [h.result(30).generated_tokens for h in handles] == [want(shared_llama, i) for i in range(3)]
        assert manager.trace()[0].requests == 3


@pytest.mark.parametrize("persistent", [False, True])
def test_a_call_that_is_complete_waits_for_nobody(shared_llama, persistent: bool) -> None:
    config = EngineConfig(policy=Static(2, quiet=LONG), block_size=4)
    options: dict[str, Any] = dict(generation_config=greedy(), continuous_batching_config=config)
    prompts = [*PROMPTS, [5, 999], *PROMPTS]  # 7, so the last batch has one; and one is bad
    whole = shared_llama.generate_batch(prompts, persistent_manager=persistent, **options).values()
    for found in (whole, shared_llama.iterate_batch(prompts, **options)):
        tokens = [r.generated_tokens for r in sorted(found, key=lambda r: r.index)]
        assert tokens == [[] if p == [5, 999] else want(shared_llama, PROMPTS.index(p)) for p in prompts]
    if persistent:  # others may come now
        with shared_llama.continuous_batching_context_manager() as manager:
            watch = Watch(manager)
            handle = manager.submit(PROMPTS[0], greedy())
            assert watch.held.wait(30)
            (beside,) = shared_llama.generate_batch([PROMPTS[1]], greedy()).values()  # completes the batch
            assert beside.generated_tokens == want(shared_llama, 1)
            assert handle.result(30).generated_tokens == want(shared_llama, 0)
        shared_llama.destroy_cached_continuous_batching_manager()


def test_who_starts_a_kept_manager_by_hand_may_have_more(shared_llama) -> None:
    """Though the call that left it behind had not."""
    config = EngineConfig(policy=Static(2, quiet=LONG), block_size=4)
    shared_llama.generate_batch(PROMPTS[:1], greedy(), config, persistent_manager=True)
    manager = shared_llama.init_continuous_batching(continuous_batching_config=config)
    watch = Watch(manager)
    manager.start()
    handles = [manager.submit(PROMPTS[0], greedy())]
    assert watch.held.wait(30)
    handles.append(manager.submit(PROMPTS[1], greedy()))
    assert [h.result(30).generated_tokens for h in handles] == [want(shared_llama, i) for i in (0, 1)]
    shared_llama.destroy_cached_continuous_batching_manager()


def test_a_session_that_leaves_is_waited_for_no_longer(shared_llama) -> None:
    config = EngineConfig(policy=Static(2, quiet=LONG), block_size=4)
    shared_llama.generate_batch(PROMPTS[:1], greedy(), config, persistent_manager=True)
    found: list[Any] = []
    call = threading.Thread(target=lambda: found.extend(shared_llama.generate_batch(PROMPTS[:1], greedy()).values()))
    with shared_llama.continuous_batching_context_manager() as manager:
        watch = Watch(manager)
        call.start()
        assert watch.held.wait(30)
    call.join(30)
    assert [result.generated_tokens for result in found] == [want(shared_llama, 0)]
    shared_llama.destroy_cached_continuous_batching_manager()


def test_so_does_generate() -> None:
    model = hf_cb.accelerate(make_model(), modules="off", policy=Static(2, quiet=LONG), block_size=4)
    found = model.generate(torch.tensor([PROMPTS[0]]), generation_config=greedy())[0, len(PROMPTS[0]) :].tolist()
    assert found == want(hf_cb.restore(model), 0)


def test_the_thread_sleeps_until_the_window_is_over(shared_llama) -> None:
    with holding(shared_llama, "dynamic:8:0.3") as (manager, watch):
        handle = manager.submit(PROMPTS[0], greedy())
        assert watch.held.wait(30)
        before = watch.steps
        assert handle.result(30).generated_tokens == want(shared_llama, 0)
        assert watch.steps - before <= len(handle.result().generated_tokens) + 3


@pytest.mark.parametrize("block", [True, False])
def test_stop_lets_a_held_batch_run(shared_llama, block: bool) -> None:
    with holding(shared_llama, Static(8, quiet=LONG)) as (manager, watch):
        handles = [manager.submit(p, greedy()) for p in PROMPTS]
        assert watch.held.wait(30)
        manager.stop(block=block)
        assert [h.result(30).generated_tokens for h in handles] == [want(shared_llama, i) for i in range(3)]


def test_a_hard_stop_ends_what_is_held(shared_llama) -> None:
    with holding(shared_llama, Static(8, quiet=LONG)) as (manager, watch):
        handle = manager.submit(PROMPTS[0], greedy())
        assert watch.held.wait(30)
        manager.stop(hard_stop=True)
        with pytest.raises(RequestCancelledError):
            handle.result(30)


WAYS_OUT: dict[str, Callable[[Any], None]] = {
    "cancelled": lambda handle: handle.cancel(),
    "timeout": lambda handle: None,
}


@pytest.mark.parametrize("reason", WAYS_OUT)
def test_a_held_request_can_be_cancelled_and_can_expire(shared_llama, reason: str) -> None:
    with holding(shared_llama, Static(8, quiet=LONG)) as (manager, watch):
        handle = manager.submit(PROMPTS[0], greedy(), deadline=0.2 if reason == "timeout" else None)
        assert watch.held.wait(30)
        WAYS_OUT[reason](handle)
        assert handle.result(30).finish_reason == reason
        assert not manager.engine.has_work


def test_a_pause_and_a_dropped_handle_while_requests_are_held(shared_llama) -> None:
    with holding(shared_llama, Static(2, quiet=LONG)) as (manager, watch):
        dropped = manager.submit(PROMPTS[0], greedy())
        assert watch.held.wait(30)
        with manager.pause():
            pass
        del dropped
        gc.collect()
        handles = [manager.submit(p, greedy()) for p in PROMPTS[1:]]
        assert [h.result(30).generated_tokens for h in handles] == [want(shared_llama, i) for i in (1, 2)]


@pytest.mark.parametrize("name", [*POLICIES, "static:2:0.01", "dynamic:2:0.01", "fair:a=2"])
def test_the_answers_are_the_same_under_every_policy(shared_llama, name: str) -> None:
    name = {"static": "static:quiet=0.01"}.get(name, name)
    config = EngineConfig(policy=name, max_num_seqs=2, block_size=4, num_blocks=24)
    with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        handles = [
            manager.submit(p, greedy(), priority=-i, user="ab"[i % 2], deadline=300.0) for i, p in enumerate(PROMPTS)
        ]
        assert [h.result(60).generated_tokens for h in handles] == [want(shared_llama, i) for i in range(3)]


def test_generate_batch_with_a_policy_by_name_and_by_object(shared_llama) -> None:
    for policy in ("static:2:0.01", hf_cb.policies.Dynamic(2, window=0.01)):
        results = shared_llama.generate_batch(PROMPTS, greedy(), EngineConfig(policy=policy))
        assert [r.generated_tokens for r in results.values()] == [want(shared_llama, i) for i in range(3)]


class Nobody(Policy):
    """Holds everybody back and says not until when."""

    name = "nobody"

    def order(self, situation: Situation) -> list[Any]:
        return []


def test_a_policy_that_lets_nobody_in_is_an_error_and_not_a_silence(shared_llama) -> None:
    with pytest.raises(RuntimeError, match="'nobody'"):
        shared_llama.generate_batch(PROMPTS, greedy(), EngineConfig(policy=Nobody()))


@pytest.mark.parametrize(
    ("options", "message"), [(dict(priority="high"), "priority.*'high'"), (dict(user=7), "user.*7")]
)
def test_bad_standing(shared_llama, manager, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        manager.submit(PROMPTS[0], greedy(), **options)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("first", "'first'.*continuous.*static"),
        ("static:many", "'static:many'.*batch_size=NUMBER"),
        ("static:0", "batch_size.*from 1 up.*0"),
        ("static:8:1:2", "'2'"),
        ("static:batch_size=8:batch_size=9", "not understood"),
        ("dynamic:8:-1", "window.*-1"),
        ("dynamic:8:inf", "window.*inf"),
        ("fair:alice=0", "'alice'.*above 0"),
        ("priority:up=3", "'up=3'"),
        ("continuous:3", "'3'"),
        (7, "policy must be.*7"),
        (object(), "hf_cb.policies.Policy"),
    ],
)
def test_bad_policies_are_refused_when_they_are_given(policy: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EngineConfig(policy=policy)
