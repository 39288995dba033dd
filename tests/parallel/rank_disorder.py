"""What ranks of a tensor-parallel model do in `test_rank_disorder.py`: what no script should do, or at odd times."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rank_scenarios import PROMPTS, TINY, load, tokens
from tiny_models import generate_alone, greedy
from torch import distributed

import hf_cb
from hf_cb import EngineConfig
from hf_cb.manager.ranks import meeting, team
from hf_cb.manager.ranks.driver import Driver
from hf_cb.models import plan

KEPT = EngineConfig(block_size=4)


def said(call: Callable[[], Any]) -> str:
    """The error that a call ends with."""
    try:
        return f"no error, but {call()!r}"
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def disagreements(rank: int, folder: str, other: str) -> dict[str, Any]:
    """Calls that the ranks make differently; then one that they make alike."""
    team.NOTICE_S, team.LATE_S = 0.2, 1.5
    model, another = load(folder), load(other)
    seen = {
        "inputs": said(lambda: model.generate_batch(PROMPTS[rank : rank + 2], greedy())),
        "stream's inputs": said(lambda: next(model.stream_batch(PROMPTS[rank : rank + 2], greedy()))),
        "options": said(lambda: model.generate_batch(PROMPTS[:2], greedy(12 + rank))),
        "kwargs": said(lambda: model.generate_batch(PROMPTS[:2], greedy(), temperature=1.0 + rank)),
        "config": said(lambda: model.init_continuous_batching(None, EngineConfig(max_num_seqs=4 + rank))),
        "calls": said(
            lambda: getattr(model, ("iterate_batch", "stream_batch")[rank])(PROMPTS[:2], greedy()).__next__()
        ),
    }
    seen["alike"] = tokens(model.generate_batch(PROMPTS[:2], greedy()))
    if rank == 0:
        seen["alone"] = said(lambda: model.generate_batch(PROMPTS[:2], greedy()))
        time.sleep(0.5)
    else:
        time.sleep(2)
        seen["alone"] = said(lambda: model.generate_batch(PROMPTS[:2], greedy()))  # too late
    if rank == 1:
        seen["alone too"] = said(lambda: model.generate_batch(PROMPTS[:2], greedy()))
    else:
        time.sleep(2)
        seen["alone too"] = said(lambda: model.generate_batch(PROMPTS[:2], greedy()))
    distributed.barrier()
    seen["alike again"] = tokens(model.generate_batch(PROMPTS[:2], greedy()))
    third, fourth = load(folder), load(other)
    seen["models"] = said(lambda: (third, fourth)[rank].generate_batch(PROMPTS[:2], greedy()))
    del another
    return seen


def between_calls(rank: int, folder: str) -> dict[str, Any]:
    """What the script does while it makes no call, at another time on each rank."""
    model = load(folder)
    seen: dict[str, Any] = {}
    model.generate_batch(PROMPTS[:2], greedy(), KEPT, persistent_manager=True)
    time.sleep(rank)
    with torch.no_grad():  # rank 1 is late with it
        for parameter in model.model.layers[0].mlp.parameters():
            parameter.mul_(-1)
    seen["changed"] = tokens(model.generate_batch(PROMPTS[:2], greedy(), persistent_manager=True))
    distributed.barrier()
    seen["changed alone"] = [generate_alone(model, prompt, greedy()) for prompt in PROMPTS[:2]]
    model.destroy_cached_continuous_batching_manager()

    torch.manual_seed(5)
    model.generate_batch(PROMPTS[:2], greedy(do_sample=True))
    seen["random"] = torch.rand(2).tolist()
    torch.manual_seed(rank)  # on purpose, one would think
    model.generate_batch(PROMPTS[:2], greedy(do_sample=True))
    seen["own random"] = torch.rand(2).tolist()

    model.train()
    for name, items in (("abandoned", 1), ("unread", 0)):
        stream = model.stream_batch(PROMPTS, greedy(100))
        for _ in range(items):
            next(stream)
        seen[name] = said(stream.close) if rank == 0 else said(partial(list, stream))
    end = time.monotonic() + 10
    while not model.training and time.monotonic() < end:
        time.sleep(0.05)
    seen["training"] = model.training
    model.eval()

    found = weakref.ref(model)
    del model, stream
    gc.collect()
    distributed.barrier()
    end = time.monotonic() + 10
    while found() is not None and time.monotonic() < end:
        time.sleep(0.05)
        gc.collect()
    seen["gone"] = found() is None
    return seen


class _Untold(Exception):
    """Its other half is on rank 1 alone."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self.args[0],)


def _read(what: str) -> Exception:
    if os.environ["RANK"] == "0":
        raise KeyError("cannot be read here")
    return _Untold(what)


def fails(rank: int, folder: str, where: str) -> dict[str, Any]:
    """Rank 1 fails alone, with an error that rank 0 cannot read: in a layer, or when all is said."""
    model = load(folder)
    model.generate_batch(PROMPTS[:2], greedy(), KEPT, persistent_manager=True)
    forwards = 0

    def fail(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 4:
            raise _Untold("out of order")

    if rank == 1 and where == "layer":
        model.model.layers[1].mlp.register_forward_pre_hook(fail)
    elif rank == 1:
        model.register_forward_hook(fail)  # after the last collective
    began = time.monotonic()
    errors = [said(lambda: tokens(model.generate_batch(PROMPTS, greedy(100), persistent_manager=True)))]
    errors += [said(lambda: tokens(model.generate_batch(PROMPTS, greedy(), persistent_manager=True)))]
    return {"errors": errors, "seconds": time.monotonic() - began}


def ends_in_a_probe(rank: int, folder: str, how: str) -> dict[str, str]:
    """While a model is looked at for the first time, rank 1 dies, or somebody presses Ctrl-C on rank 0."""
    model = load(folder)

    def end(*_: Any) -> None:
        if how == "dies":
            os._exit(1)
        raise KeyboardInterrupt

    if rank == (how == "dies"):
        model.model.layers[1].mlp.register_forward_pre_hook(end)
    seen = {"first": said(lambda: model.generate_batch(PROMPTS[:2], greedy()))}
    return seen | {"explained": said(lambda: hf_cb.explain(model))}


def dies_before_they_meet(rank: int, folder: str) -> str:
    """Rank 0, which has the store."""
    model = load(folder)
    if rank == 0:
        os._exit(1)
    time.sleep(0.5)
    return said(lambda: model.generate_batch(PROMPTS[:2], greedy()))


def forks(rank: int, folder: str) -> dict[str, Any]:
    """Processes that are forked from a rank come and go, as a DataLoader's do."""
    model = load(folder)
    seen: dict[str, Any] = {
        "before": tokens(model.generate_batch(PROMPTS[:2], greedy(), KEPT, persistent_manager=True))
    }
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # or it may have none
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def child() -> None:
        results.put(said(lambda: model.generate_batch(PROMPTS[:2], greedy())))

    process = context.Process(target=child)
    process.start()
    seen["child"] = results.get()
    process.join()
    seen["after"] = tokens(model.generate_batch(PROMPTS[:2], greedy(), persistent_manager=True))
    staying = context.Process(target=time.sleep, args=(5,))
    staying.start()
    if rank == 1:
        time.sleep(0.5)
        os._exit(1)  # its child still lives
    began = time.monotonic()
    while "gone" not in (told := said(lambda: model.generate_batch(PROMPTS[:2], greedy()))):
        assert time.monotonic() < began + 10, told
    seen["error"] = told
    seen["seconds"] = time.monotonic() - began
    staying.kill()
    return seen


def reentrant(rank: int, folder: str) -> list[list[int]]:
    """A garbage collection in the middle of a message sends another one."""
    model = load(folder)
    of_rank = meeting.team_of(model)
    if isinstance(of_rank, Driver):
        connection = of_rank._orders.connections[1]
        of_rank._orders.connections[1] = _Collecting(connection, of_rank)
    return tokens(model.generate_batch(PROMPTS, greedy(), TINY))


class _Collecting:
    def __init__(self, connection: Any, driver: Driver) -> None:
        self._connection, self._driver = connection, driver

    def send_bytes(self, data: bytes) -> None:
        if b"drop" not in data:
            self._driver.drop(12345)
        self._connection.send_bytes(data)


def managers(rank: int, folder: str) -> dict[str, Any]:
    """Calls on a manager that do no harm to make twice, or on every rank."""
    model = load(folder)
    manager = model.init_continuous_batching(continuous_batching_config=KEPT)
    for _ in range(2):
        manager.start()
    if rank == 0:
        handle = manager.submit(PROMPTS[0], greedy())
    manager.reset_prefix_cache()
    paused = said(lambda: manager.pause().__enter__())
    manager.stop(block=True, timeout=20)
    seen = {"running": manager.is_running(), "paused": paused}
    manager.start()
    seen["running again"] = manager.is_running()
    if rank == 0:
        assert handle.result().finish_reason == "length"
    distributed.barrier()
    manager.stop()
    seen["stopped"] = not manager.is_running()
    return seen


def traffic(rank: int, folder: str, seed: int, overlap: bool) -> dict[int, list[int]]:
    """Requests that come and are cancelled at random, in a cache so small that they give way to each other, partly to
    the host's memory."""
    resolve = plan.resolve
    plan.resolve = lambda config, around: resolve(config, replace(around, device_type="xpu"))  # for cpu_offload_space
    model = load(folder)
    config = EngineConfig(
        block_size=4,
        num_blocks=24,
        max_batch_tokens=16,
        max_num_seqs=5,
        overlap=overlap,
        cpu_offload_space="1MB",
        attention="reference",  # whose blocks can be kept elsewhere
    )
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
        if rank != 0:
            return {}
        rng, kept = random.Random(seed), {}
        for i in range(40):
            prompt = PROMPTS[i % len(PROMPTS)][: rng.choice([1, 12, 40])]
            handle = manager.submit(prompt, greedy(rng.choice([1, 6, 20])))
            if rng.random() < 0.35:
                next(iter(handle), None) if rng.random() < 0.5 else None
                handle.cancel()
            else:
                kept[i] = (prompt, handle)
        found = {i: (prompt, handle.result().generated_tokens) for i, (prompt, handle) in kept.items()}
        assert sum(handle.metrics.preemptions for _, handle in kept.values()) > 0
    manager.engine.check_idle()
    return found
