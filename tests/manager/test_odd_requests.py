"""Requests that misbehave, or are asked for in odd ways: each gets its own answer, and its mates theirs."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tiny_models import generate_alone, greedy, make_model, make_prompts

import hf_cb
from hf_cb import EngineConfig, OptionError

pytestmark = pytest.mark.usefixtures("patched")
PROMPTS = make_prompts([5, 12, 3])


def test_unpatching_under_a_running_manager_changes_no_answer(shared_llama) -> None:
    want = [generate_alone(shared_llama, p, greedy(150)) for p in PROMPTS]
    with shared_llama.continuous_batching_context_manager() as manager:
        handles = [manager.submit(p, greedy(150)) for p in PROMPTS]
        next(iter(handles[0]))
        hf_cb.unpatch()
        assert [h.result().generated_tokens for h in handles] == want


def test_an_old_handle_does_not_cancel_a_new_request_of_the_same_id(manager) -> None:
    old = manager.submit(PROMPTS[0], greedy(2), request_id="mine")
    old.result()
    new = manager.submit(PROMPTS[0], greedy(100), request_id="mine")
    old.cancel()
    assert new.result().finish_reason == "length"


def test_ids_given_by_the_caller_do_not_collide_with_automatic_ones(manager) -> None:
    held = manager.submit(PROMPTS[0], greedy(100), request_id="req_0")
    assert manager.submit(PROMPTS[0], greedy(2)).request_id == "req_1"
    held.cancel()


def test_a_handler_that_raises_spoils_nobody_elses_news(manager) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        with manager.pause():
            for _ in range(3):
                request_id = manager.add_request(PROMPTS[0], max_new_tokens=2)
                manager.register_result_handler(request_id, lambda output: 1 / 0)
            handles = [manager.submit(p, greedy(2)) for p in PROMPTS]
        outputs = await asyncio.wait_for(asyncio.gather(*handles), 5)
        assert all(o.error is None for o in outputs)

    asyncio.run(main())


def test_no_gradients_in_processors_and_stop_checks(manager) -> None:
    seen = []

    def look(*args, **_):
        seen.append(torch.is_grad_enabled())
        return args[1] if args[1] is not None else torch.tensor([False])

    manager.submit(PROMPTS[0], greedy(2), logits_processor=[look], stopping_criteria=[look]).result()
    assert seen == [False] * 4


def test_a_processor_with_scores_of_another_width(manager) -> None:
    def wide(ids, scores):
        return torch.cat([scores, torch.full((1, 5), 1e9)], -1)

    bad, good = manager.submit(PROMPTS[0], greedy(), logits_processor=[wide]), manager.submit(PROMPTS[1], greedy())
    with pytest.raises(ValueError, match=r"shape \(1, 133\) instead of \(1, 128\)"):
        bad.result(5)
    assert good.result(5).error is None


@pytest.mark.parametrize("stage", ["logits_processor", "stopping_criteria"])
def test_a_request_that_calls_exit(manager, stage: str) -> None:
    bad = manager.submit(PROMPTS[0], greedy(), **{stage: [lambda *_, **__: sys.exit(3)]})
    good = manager.submit(PROMPTS[1], greedy())
    with pytest.raises(RuntimeError, match="SystemExit"):
        bad.result(5)
    assert good.result(5).error is None


def test_sampling_where_everything_is_excluded(manager) -> None:
    def nothing(ids, scores):
        return torch.full_like(scores, float("-inf"))

    with pytest.raises(ValueError, match="exclude them all"):
        manager.submit(PROMPTS[0], greedy(do_sample=True), logits_processor=[nothing]).result(5)


def test_under_inference_mode(shared_llama) -> None:
    with torch.inference_mode():
        results = shared_llama.generate_batch(PROMPTS, greedy(4))
    assert [r.generated_tokens for r in results.values()] == [
        generate_alone(shared_llama, p, greedy(4)) for p in PROMPTS
    ]


def test_the_random_state_is_left_alone_even_by_a_training_model_with_dropout() -> None:
    model = make_model("Phi", resid_pdrop=0.5, attention_dropout=0.5).train()
    before = torch.random.get_rng_state()
    model.generate_batch(PROMPTS, greedy(2))
    assert torch.equal(before, torch.random.get_rng_state()) and model.training


def test_seeds_from_many_threads(shared_llama) -> None:
    config = EngineConfig(seed=3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with shared_llama.continuous_batching_context_manager(continuous_batching_config=config) as manager:
            options = greedy(1, do_sample=True)
            with ThreadPoolExecutor(8) as pool:
                handles = list(pool.map(lambda _: manager.submit(PROMPTS[0], options), range(200)))
            assert all(h.result().error is None for h in handles)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("form", [torch.tensor, lambda e: [torch.tensor(e)], np.int64, lambda e: np.array([e, e])])
def test_forms_of_eos(shared_llama, form) -> None:
    free = generate_alone(shared_llama, PROMPTS[0], greedy(12))
    (result,) = shared_llama.generate_batch([PROMPTS[0]], greedy(12), eos_token_id=form(free[4])).values()
    assert result.generated_tokens == free[: free.index(free[4]) + 1]


@pytest.mark.parametrize("value", ["5", [None], [[5]], True, 1.5])
def test_wrong_eos(shared_llama, value) -> None:
    with pytest.raises(OptionError, match="eos_token_id"):
        shared_llama.generate_batch([PROMPTS[0]], eos_token_id=value)


def test_a_replaced_module_drops_the_prefix_cache(llama) -> None:
    prompt = make_prompts([40])[0]
    with llama.continuous_batching_context_manager(continuous_batching_config=EngineConfig(block_size=4)) as manager:
        manager.submit(prompt, greedy(3)).result()
        with manager.pause():
            llama.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 96, bias=False)
        result = manager.submit(prompt, greedy(3)).result()
    assert result.generated_tokens == generate_alone(llama, prompt, greedy(3)) and result.metrics.cached_tokens == 0


def test_add_requests_adds_all_or_none(manager) -> None:
    with pytest.raises(ValueError):
        manager.add_requests([PROMPTS[0], [], PROMPTS[1]], max_new_tokens=2)
    assert manager.get_result(timeout=0.2) is None and manager.stats().finished == 0


def test_batch_calls_are_not_bound_by_the_queue_limit(shared_llama) -> None:
    config = EngineConfig(max_queue_size=2)
    assert len(shared_llama.generate_batch(PROMPTS * 5, greedy(2), config)) == 15
    assert len(list(shared_llama.iterate_batch(PROMPTS * 5, greedy(2), config))) == 15


def test_results_come_while_more_inputs_are_read(shared_llama) -> None:
    read = []

    def slow_inputs():
        for i in range(20):
            read.append(i)
            time.sleep(0.03)
            yield PROMPTS[i % 3]

    results = shared_llama.iterate_batch(slow_inputs(), greedy(1))
    next(results)
    assert len(read) < 20
    assert len(list(results)) == 19


class Odd(BaseException):
    def __str__(self) -> str:
        raise AttributeError


@pytest.mark.parametrize("kind", [Odd, type("Silent", (Exception,), {"__str__": Odd.__str__}), GeneratorExit])
@pytest.mark.parametrize("stage", ["logits_processor", "stopping_criteria"])
def test_odd_exceptions_end_their_request_alone(manager, kind: type[BaseException], stage: str) -> None:
    def bad(*_: object, **__: object) -> None:
        raise kind

    with manager.pause():
        odd = manager.submit(PROMPTS[0], greedy(4), **{stage: [bad]})
        good = manager.submit(PROMPTS[0], greedy(4))
    with pytest.raises(Exception):  # noqa: B017
        odd.result(5)
    assert good.result(5).error is None and manager.is_running()


def test_a_handler_that_raises_what_no_exception_is(manager) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        request_id = manager.add_request(PROMPTS[0], max_new_tokens=3)

        def cancelled(_: object) -> None:
            raise asyncio.CancelledError

        manager.register_result_handler(request_id, cancelled)
        await asyncio.wait_for(asyncio.gather(*(manager.submit(PROMPTS[0], greedy(3)) for _ in range(3))), 5)

    asyncio.run(main())


def test_cancelling_a_request_of_a_run_that_died(shared_llama) -> None:
    manager = shared_llama.init_continuous_batching()
    waiting = manager.submit(PROMPTS[0], greedy(3))  # in the inbox, when the run ends
    manager.loop._inbox.insert(0, lambda: 1 / 0)
    manager.start()
    with pytest.raises(ZeroDivisionError):
        waiting.result(5)
    manager.join(5)
    manager.start()
    waiting.cancel()
    del waiting
    assert manager.submit(PROMPTS[0], greedy(3)).result(5).error is None
    manager.stop()


def test_a_thread_that_cannot_be_started(shared_llama, monkeypatch) -> None:
    manager = shared_llama.init_continuous_batching()

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            manager.start()
    assert not manager.is_running()
    manager.start()
    assert manager.submit(PROMPTS[0], greedy(3)).result(5).error is None
    manager.stop()


def test_paged_implementations_are_refused_with_the_remedy() -> None:
    model = make_model()
    model.config._attn_implementation = "paged|eager"
    with pytest.raises(NotImplementedError, match=r"set_attn_implementation\('eager'\)"):
        model.generate_batch(PROMPTS, greedy(2))
