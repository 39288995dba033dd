"""Plays a trace in real time: each setting in its turn, on a fresh manager, the model staying where it is.

Every other round goes backwards (A B, B A, ...), so that a machine which slows down or speeds up evenly favours nobody.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol

from hf_cb.bench.others import OtherWork
from hf_cb.bench.replay.calls import Call
from hf_cb.bench.replay.turn import Outcome, Served, Turn
from hf_cb.config import EngineConfig
from hf_cb.errors import HfCbError, ManagerStoppedError, QueueFullError, describe
from hf_cb.manager.session import open_manager
from hf_cb.patching import accelerate, restore

# spelled out, since a model's own generation config may sample or penalise
USUAL: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0}
DEAF: dict[str, Any] = {"eos_token_id": -1}  # no token ends an answer before its length
WARM_UP = 4  # requests, of so many tokens
Opener = Callable[[EngineConfig], AbstractContextManager[Any]]


class Submitted(Protocol):
    """What `submit` returns, as far as it matters here."""

    def outputs(self) -> Sequence[Any]: ...


def play(
    model: Any,
    configs: Mapping[str, EngineConfig],
    calls: Sequence[Call],
    repeat: int = 1,
    on_turn: Callable[[Turn], None] | None = None,
    opener: Opener | None = None,
) -> list[Turn]:
    """All turns in the order in which they were played.

    Args:
        configs: by setting's name.
        repeat: rounds; in each, every setting has one turn.
        on_turn: called after each.
        opener: gives a running manager for a config; by default one on the accelerated model.

    Raises:
        OptionError and the like: a setting that this model or machine cannot have.
    """
    if opener is None:
        accelerate(model)
    open_one = opener or (lambda config: open_manager(model, config))
    turns = []
    try:
        for i in range(repeat):
            order = list(configs) if i % 2 == 0 else list(configs)[::-1]
            for name in order:
                turns.append(_turn(open_one, name, configs[name], calls, i))
                if on_turn is not None:
                    on_turn(turns[-1])
    finally:
        if opener is None:
            restore(model)
    return turns


def _turn(opener: Opener, name: str, config: EngineConfig, calls: Sequence[Call], round_: int) -> Turn:
    with opener(config) as manager:
        _warm_up(manager, calls)
        gc.collect()  # now rather than in the middle
        steps, others = manager.stats().steps, OtherWork()
        began = time.perf_counter()
        submitted = [_submit(manager, call) for call in _arriving(calls, began)]
        requests = [_served(call, found, began) for call, found in zip(calls, submitted, strict=True)]
        seconds = time.perf_counter() - began
        return Turn(name, round_, seconds, requests, manager.stats().steps - steps, others.cores())


def _arriving(calls: Sequence[Call], began: float) -> Iterator[Call]:
    for call in calls:
        time.sleep(max(0.0, began + call.at - time.perf_counter()))
        yield call


def _submit(manager: Any, call: Call) -> Submitted | Exception:
    """A handle, or why there is none."""
    options = {**USUAL, **call.options, **DEAF, "max_new_tokens": call.output_tokens}
    try:
        handle: Submitted = manager.submit(call.prompt, **options)
        return handle
    except ManagerStoppedError:
        raise
    except (HfCbError, TypeError, ValueError) as error:
        return error


def _served(call: Call, found: Submitted | Exception, began: float) -> Served:
    """What became of a request; waits for its end."""
    due = began + call.at
    if isinstance(found, Exception):
        return Served(call.at, "rejected" if isinstance(found, QueueFullError) else "error", message=describe(found))
    output = found.outputs()[0]
    times = list(output.timestamps or [])
    started, finished = output.lifespan
    served = Served(
        call.at,
        _outcome(output, call),
        late_s=output.created_time - due,
        tokens=len(times),
        cached_tokens=output.metrics.cached_tokens,
        preemptions=output.metrics.preemptions,
        message=output.error or "",
    )
    if served.outcome == "error" and not served.message:
        served.message = f"{len(times)} tokens instead of {call.output_tokens} ({output.finish_reason})"
    if started > 0:
        served.queue_s = started - due
    if times:
        served.prefill_s, served.ttft_s = times[0] - started, times[0] - due
        served.gaps = [after - before for before, after in pairwise(times)]
    if finished > 0:
        served.e2e_s = finished - due
    return served


def _outcome(output: Any, call: Call) -> Outcome:
    if output.finish_reason == "timeout":
        return "timeout"
    made = len(output.generated_tokens)
    return "done" if output.error is None and made == call.output_tokens else "error"


def _warm_up(manager: Any, calls: Sequence[Call]) -> None:
    """A few tokens for prompts of the trace's own lengths, whose prefixes are forgotten again."""
    handles = []
    for call in calls[:WARM_UP]:
        prompt = call.prompt[: max(1, math.ceil(len(call.prompt) / 2))]
        found = _submit(manager, Call(0.0, prompt, min(WARM_UP, call.output_tokens), {}))
        if not isinstance(found, Exception):
            handles.append(found)
    for handle in handles:
        handle.outputs()
    manager.reset_prefix_cache()
