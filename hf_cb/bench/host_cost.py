"""What a step costs the host: the whole engine on a runner without a model, whose forward takes no time.

usage: python -m hf_cb.bench.host_cost [--rows 1,64,256] [--contexts 1024,8192] [--kinds greedy,...] [--steps 100]

All rows decode, and steps overlap, as on a GPU. Medians in ms of the engine's thread (processor time, which other
programs on the machine disturb least; `--wall`: time on the clock). `fill` is what a GPU's inputs are written in, with
two copies that a GPU would make; `route` what registry, counts and handles take; `rest` what is left between two steps:
reading the tokens, the StepRecord, deadlines, the loop. With `--streams`, an
event loop reads every request's text as it comes. `on the clock` is from one step to the next, whoever had the lock;
with `--device-ms`, a device takes so long for each step, and has nothing to do in what lies above that.
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
from typing import Any

import torch
from torch import Tensor, nn

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams, Update
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.engine import Engine
from hf_cb.engine.sampler import Drawing, Sampled
from hf_cb.engine.simulation import NoModel, SimulatedClock
from hf_cb.errors import RequestCancelledError
from hf_cb.manager.handle import Handle
from hf_cb.manager.loop import EngineLoop
from hf_cb.manager.mailbox import Mailbox
from hf_cb.manager.registry import Registry
from hf_cb.manager.router import Router
from hf_cb.metrics.counts import Metrics
from hf_cb.models.drawing import Settings
from hf_cb.models.fixed_inputs import FixedInputs
from hf_cb.models.groups import LayerGroup
from hf_cb.models.sending import to_device
from hf_cb.sizes import Surroundings, resolve
from hf_cb.steps import Drawn, PlanPart, StepBatch
from hf_cb.text.rendering import Rendering
from hf_cb.text.stop_strings import StopStrings
from hf_cb.warpers import Warpers

VOCAB, TOKEN = 256, 97
PAGE, CHUNK = 16, 2048
WARM_UP = 10  # steps that are not counted
COLUMNS = ("plan", "build", "fill", "sample", "commit", "rest", "route", "all", "on the clock")
KINDS = ("greedy", "no prefix cache", "two groups", "sampled", "logprobs", "stop strings", "mixed")


class NoForward(NoModel):
    """Takes a step's numbers as a model on a GPU does, and says the same token for every row."""

    overlaps = True

    def __init__(self, two_groups: bool, rows: int, longest: int, device_s: float) -> None:
        super().__init__(SimulatedClock(), lambda rows, tokens: 0.0)
        if two_groups:
            self.groups = [*self.groups, LayerGroup(layers=(1,), storages=(0,), window=1024)]
        self._inputs = FixedInputs(rows, len(self.groups), -(-longest // PAGE), PAGE, self.device)
        self._device_s = device_s
        self.ready = 0.0  # when the device is done with all that it was told
        self._logits = torch.zeros(1, VOCAB).index_fill(1, torch.tensor([TOKEN]), 1.0)

    def forward(self, batch: StepBatch) -> Any:
        rows = len(batch.logits_rows)
        if rows == len(batch.input_ids):
            self._inputs.fill(batch, rows)
        else:
            to_device(batch, self.device)
        self.ready = max(time.perf_counter(), self.ready) + self._device_s
        logits = self._logits.expand(rows, VOCAB)
        return logits if batch.draws is None else draw(logits)


def draw(logits: Tensor, settings: Settings | None = None) -> Drawn:
    """In place of the kernel that does so."""
    return Drawn(torch.full((len(logits),), TOKEN), torch.zeros(len(logits)))


class TimedSampler(DeviceSampler):
    """Where steps overlap, a record's `sample_s` has the commit of the step before in it."""

    def __init__(self, clock: Callable[[], float], runner: NoForward) -> None:
        super().__init__(draw)
        self._clock, self._runner = clock, runner
        self.seconds = 0.0

    def sample(self, logits: Tensor | Drawn, parts: Sequence[PlanPart]) -> list[list[Sampled]] | Drawing:
        began = self._clock()
        drawing = super().sample(logits, parts)
        self.seconds = self._clock() - began
        assert isinstance(drawing, Drawing)
        return Drawing(drawing.tokens, partial(self._read, drawing, self._runner.ready))

    def _read(self, drawing: Drawing, ready: float) -> list[list[Sampled]]:
        if (left := ready - time.perf_counter()) > 0:
            time.sleep(left)
        return drawing.read()


def params_of(kind: str) -> SamplingParams:
    params = SamplingParams(10**6, eos_token_ids=frozenset([0]))
    if kind == "sampled":
        return replace(params, do_sample=True, process=lambda ids, scores: scores, warpers=Warpers(0.8, 50, 0.95))
    if kind == "stop strings":
        return replace(params, stop_checks=(StopStrings(_byte_tokenizer(), ["\n\nQ:", "<|stop|>"]),))
    return replace(params, logprobs=True) if kind == "logprobs" else params


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    whole = Tokenizer(models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=whole)


def measure(
    kind: str,
    rows: int,
    context: int,
    steps: int = 100,
    streams: bool = False,
    device_s: float = 0.0,
    clock: Callable[[], float] = time.thread_time,
) -> list[float]:
    """Seconds of a step, as in COLUMNS: medians, and the mean of the last one."""
    most = 2 * (steps + WARM_UP)
    mixed = kind == "mixed"  # then each step has a prompt too, which wants one token
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
    rendering = Rendering(_byte_tokenizer()) if streams else None
    params = replace(params_of(kind), max_new_tokens=most)
    submit = partial(_submit, engine, router, registry, rendering)
    handles = [submit(f"r{i}", [i % VOCAB, i // VOCAB] * (context // 2), params) for i in range(rows - mixed)]
    while any(not request.num_output for request in router.live()):
        engine.step()
    engine.scheduler.config = replace(config, prefill_chunk=CHUNK)
    params = replace(params, max_new_tokens=1)
    handles += [submit(f"p{i}", [VOCAB + i] * CHUNK, params) for i in range(mixed * most)]
    loop.start(deliver, lambda dropped: None)
    if streams:
        asyncio.run(_read(handles))
    loop.join()
    own, on_clock = [column for *column, _ in found[WARM_UP:]], found[-1][-1] - found[WARM_UP - 1][-1]
    return [*map(median, zip(*own, strict=True)), on_clock / len(own)]


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
    with registry.entering([request], False, 0.0):
        router.attach(request, mailbox)
        engine.admit(request)
    return Handle(mailbox, _nothing, _nothing, _nothing, lambda *_: "", rendering)


def _nothing() -> None: ...


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
                print(f"| {kind} | {rows} | {context} | {' | '.join(f'{1e3 * s:.3f}' for s in found)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
