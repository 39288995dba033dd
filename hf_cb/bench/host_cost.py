"""What a step costs the host: the whole engine, its loop and its router, on a device that is only pretended.

usage: python -m hf_cb.bench.host_cost [--rows 1,64,256] [--contexts 1024,8192] [--kinds greedy,...] [--steps 100]

All rows decode, and steps overlap, as on a GPU; in a mixed step there is a prompt beside them. Medians in ms of the
engine's thread (processor time, which other programs on the machine disturb least; `--wall`: time on the clock). `fill`
is what a GPU's inputs are written in, with two copies that the GPU would make; `route` what registry, counts and
mailboxes take; `rest` what is left between two steps: reading the tokens, the StepRecord, deadlines, the loop.

With `--streams`, an event loop reads every request's text as it comes. With `--device-ms`, the device takes so long for
each step: `share` is the host's work against that, and in what the last column, from one step to the next on the clock,
has above it, the device has nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import median

from torch import nn

from hf_cb.bench.host_parts import KINDS, PAGE, VOCAB, NoForward, TimedSampler, byte_tokenizer, params_of
from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams, Update
from hf_cb.engine.engine import Engine
from hf_cb.errors import RequestCancelledError
from hf_cb.manager.handle import Handle
from hf_cb.manager.loop import EngineLoop
from hf_cb.manager.mailbox import Mailbox
from hf_cb.manager.registry import Registry
from hf_cb.manager.router import Router
from hf_cb.metrics.counts import Metrics
from hf_cb.sizes import Surroundings, resolve
from hf_cb.text.rendering import Rendering

CHUNK = 2048  # of the prompt in a mixed step
WARM_UP = 10  # steps that are not counted
COLUMNS = ("plan", "build", "fill", "sample", "commit", "rest", "route", "all", "share", "on the clock")


def measure(
    kind: str,
    rows: int,
    context: int,
    steps: int = 100,
    streams: bool = False,
    device_s: float = 0.0,
    clock: Callable[[], float] = time.thread_time,
) -> list[float]:
    """Seconds of a step, as in COLUMNS without the share: medians, and the mean of the last one."""
    most = 2 * (steps + WARM_UP)
    mixed = kind == "mixed"  # then each step has a prompt too, which wants one token
    engine, sampler = _make_engine(kind, rows, context, most, device_s, clock)
    router, registry, metrics = Router(), Registry(0), Metrics()
    found: list[list[float]] = []
    last = [clock(), time.perf_counter()]

    def deliver(updates: list[Update], error: BaseException | None) -> None:
        began = clock()
        if error is not None:
            updates = [Update(request, []) for request in router.live()]
        registry.leave(updates, everybody=error is not None)
        metrics.count(updates, died=error is not None)
        router.deliver(updates, error)
        if not engine.records:  # the first step is launched
            return
        now, record = [clock(), time.perf_counter()], engine.records[-1]
        own = [record.plan_s, record.build_s, record.forward_s, sampler.seconds, record.commit_s, now[0] - began]
        every = now[0] - last[0]
        if (record.decode_tokens, record.prefill_tokens) == (rows - mixed, mixed * CHUNK):
            found.append([*own[:5], every - sum(own), own[5], every, now[1]])
        last[:] = now
        if len(found) == steps + WARM_UP or not len(registry):
            loop.stop(hard=True)

    loop = EngineLoop(engine, nn.Identity().eval(), deliver, lambda dropped: None, 1, 1e-4, 1.0)
    rendering = Rendering(byte_tokenizer()) if streams else None
    params = replace(params_of(kind), max_new_tokens=most)
    submit = partial(_submit, engine, router, registry, rendering)
    handles = [submit(f"r{i}", [i % VOCAB, i // VOCAB] * (context // 2), params) for i in range(rows - mixed)]
    while any(not request.num_output for request in router.live()):
        engine.step()
    engine.scheduler.config = replace(engine.config, prefill_chunk=CHUNK)
    params = replace(params, max_new_tokens=1)
    handles += [submit(f"p{i}", [VOCAB + i] * CHUNK, params) for i in range(mixed * most)]
    loop.start(deliver, lambda dropped: None)
    if streams:
        asyncio.run(_read(handles))
    loop.join()
    own, on_clock = [column for *column, _ in found[WARM_UP:]], found[-1][-1] - found[WARM_UP - 1][-1]
    return [*map(median, zip(*own, strict=True)), on_clock / len(own)]


def _make_engine(
    kind: str, rows: int, context: int, most: int, device_s: float, clock: Callable[[], float]
) -> tuple[Engine, TimedSampler]:
    """With room for so many rows of so much context and `most` more tokens each."""
    mixed = kind == "mixed"
    blocks = -(-(rows * (context + most) + 3 * mixed * CHUNK) // PAGE) + 2 * rows
    options = EngineConfig(
        block_size=PAGE,
        num_blocks=2 * blocks if kind == "two groups" else blocks,
        max_num_seqs=rows + mixed,
        max_batch_tokens=2**18,
        prefix_caching=kind != "no prefix cache",
        overlap=True,
    )
    config = resolve(options, Surroundings(2**30, 2**62, "cuda", lambda size: 1))
    runner = NoForward(kind == "two groups", rows + mixed, max(context, CHUNK) + most, device_s)
    sampler = TimedSampler(clock, runner)
    engine = Engine(runner, config, sampler=sampler, clock=clock)
    engine.recovers = False
    return engine, sampler


def _submit(
    engine: Engine,
    router: Router,
    registry: Registry,
    rendering: Rendering | None,
    name: str,
    prompt: list[int],
    params: SamplingParams,
) -> Handle:
    request = Request(name, prompt, params)
    mailbox = Mailbox([request])
    with registry.entering([request], False, 0.0, _nothing):
        router.attach(request, mailbox)
        engine.admit(request)
    return Handle(mailbox, _nothing, _nothing, _nothing, lambda *_: "", rendering)


def _nothing(*_: object) -> None: ...


async def _read(handles: Sequence[Handle]) -> None:
    async def all_of(handle: Handle) -> None:
        with suppress(RequestCancelledError):  # the end of the measurement
            async for _ in handle:
                pass

    await asyncio.gather(*map(all_of, handles))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each kind, context and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,256,512")
    parser.add_argument("--contexts", default="1024,8192,32768")
    parser.add_argument("--kinds", default="greedy", help=f"of {', '.join(KINDS)}; or all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--device-ms", type=float, default=0.0)
    parser.add_argument("--wall", action="store_true")
    given = parser.parse_args(argv)
    clock = time.perf_counter if given.wall else time.thread_time
    print(f"| kind | rows | context | {' | '.join(COLUMNS)} |\n{'|---' * (len(COLUMNS) + 3)}|")
    for kind in KINDS if given.kinds == "all" else given.kinds.split(","):
        for context in map(int, given.contexts.split(",")):
            for rows in map(int, given.rows.split(",")):
                if kind == "mixed" and rows == 1:
                    continue  # nobody would wait for the prompt
                found = measure(kind, rows, context, given.steps, given.streams, given.device_ms / 1e3, clock)
                *own, every, on_clock = (f"{1e3 * seconds:.3f}" for seconds in found)
                share = f"{1e3 * found[-2] / given.device_ms:.0%}" if given.device_ms else ""
                print(f"| {kind} | {rows} | {context} | {' | '.join([*own, every, share, on_clock])} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
