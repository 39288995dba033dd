"""The engines that are compared. All make the same number of tokens: greedy, and deaf to end tokens.

A clock runs from the first submission to the last result, and starts when managers and caches are made.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_cb.bench.workload import Workload
from hf_cb.config import EngineConfig
from hf_cb.core import StepRecord
from hf_cb.errors import OptionError
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.manager.session import open_manager
from hf_cb.models.plan import Need
from hf_cb.patching import accelerate, restore

# spelled out, since a model's own generation config may sample or penalise
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "repetition_penalty": 1.0}
TRACE_STEPS = 2**18  # enough for every step of a run to leave its record


@dataclass
class Measured:
    """One run of one engine; times in seconds.

    `ttft` has for each request the time from the start to its first token, `itl` every gap between two tokens
    of the same request. `problems` says what was not as ordered; `steps` is hf_cb's own trace.
    """

    engine: str
    output_tokens: int
    seconds: float
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def tok_s(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


class BenchEngine(Protocol):
    """Something that generates for a workload and measures itself."""

    name: str

    def run(self, workload: Workload) -> Measured: ...


class HfCb:
    """hf_cb itself; it is on for the model only while it runs.

    Args:
        model: a loaded transformers model.
        options: fields of `EngineConfig`.
    """

    name = "hf_cb"

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.config = EngineConfig.of(None, **({"trace_steps": TRACE_STEPS} | options))

    def run(self, workload: Workload) -> Measured:
        need = Need(workload.prompt_tokens + workload.output_tokens, len(workload.requests))
        accelerate(self.model)
        try:
            with open_manager(self.model, self.config, need=need) as manager:
                started = time.perf_counter()
                handles = [manager.submit(r.prompt, max_new_tokens=r.max_new, **GREEDY) for r in workload.requests]
                outputs = [handle.outputs()[0] for handle in handles]
                seconds = time.perf_counter() - started
                steps = manager.trace()
        finally:
            restore(self.model)
        counts = [len(o.generated_tokens) for o in outputs]
        measured = _measured(self.name, workload, counts, seconds, [o.error for o in outputs])
        measured.ttft, measured.itl = _latencies(started, (o.timestamps or [] for o in outputs))
        measured.steps = steps
        return measured


class Generate:
    """`model.generate` on fixed, padded batches in input order; each runs until its longest output ends."""

    name = "generate"

    def __init__(self, model: Any, batch_size: int = 16) -> None:
        self.model = model
        self.batch_size = batch_size

    def run(self, workload: Workload) -> Measured:
        counts: list[int] = []
        times: list[list[float]] = []
        started = time.perf_counter()
        for begin in range(0, len(workload.requests), self.batch_size):
            batch = workload.requests[begin : begin + self.batch_size]
            clock = _Clock()
            made = self._generate([r.prompt for r in batch], max(r.max_new for r in batch), clock)
            counts += [min(made, r.max_new) for r in batch]
            times += [clock.times[: r.max_new] for r in batch]
        seconds = time.perf_counter() - started
        measured = _measured(self.name, workload, counts, seconds, [None] * len(counts))
        measured.ttft, measured.itl = _latencies(started, times)
        return measured

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], max_new: int, clock: _Clock) -> int:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        output = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=max_new,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
            **GREEDY,
        )
        return int(output.shape[1]) - width


class TransformersBatching:
    """transformers' own continuous batching, with the attention that the model was loaded with."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, workload: Workload) -> Measured:
        longest = max(r.max_new for r in workload.requests)
        config = GenerationConfig(max_new_tokens=longest, pad_token_id=0, **GREEDY)
        outputs: dict[str, Any] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=_sizes_for(workload)
        ) as manager:
            if isinstance(manager, ContinuousBatchingManager):
                raise OptionError("hf_cb.patch() has replaced transformers' own batching: unpatch first.")
            started = time.perf_counter()
            ids = [
                manager.add_request(r.prompt, max_new_tokens=r.max_new, record_timestamps=True)
                for r in workload.requests
            ]
            while len(outputs) < len(ids):
                output = manager.get_result(timeout=1)
                if output is None and not manager.is_running():
                    break  # it has died: what is missing is reported
                if output is not None and output.is_finished():
                    outputs[output.request_id] = output
            seconds = time.perf_counter() - started
        found = [outputs.get(i) for i in ids]
        counts = [0 if o is None else len(o.generated_tokens) for o in found]
        errors = ["no result" if o is None else o.error for o in found]
        measured = _measured(self.name, workload, counts, seconds, errors)
        measured.ttft, measured.itl = _latencies(started, ((o.timestamps or []) if o else [] for o in found))
        return measured


NAMES = (HfCb.name, Generate.name, TransformersBatching.name)


def make_engines(names: Sequence[str], model: Any, **options: Any) -> list[BenchEngine]:
    """The engines by name, on one model; `options` are for hf_cb.

    Raises:
        OptionError: an unknown name or option.
    """
    engines: list[BenchEngine] = []
    for name in names:
        if name == HfCb.name:
            engines.append(HfCb(model, **options))
        elif name == Generate.name:
            engines.append(Generate(model))
        elif name == TransformersBatching.name:
            engines.append(TransformersBatching(model))
        else:
            raise OptionError(f"engine {name!r} is unknown; the engines are {', '.join(NAMES)}.")
    return engines


class _Clock(StoppingCriteria):
    """Notes when each token of a batch is there, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _sizes_for(workload: Workload) -> ContinuousBatchingConfig:
    """Sizes that hold the whole workload; by itself, transformers takes most of the machine's memory."""
    config = ContinuousBatchingConfig()
    page = getattr(config, "page_size", None) or config.block_size  # the name in 5.17
    config.num_blocks = sum(1 + -(-(len(r.prompt) + r.max_new) // page) for r in workload.requests)
    # its own default, which 5.17 forgets where num_blocks is given; never more than there is to compute
    config.max_batch_tokens = max(256, min(8192, workload.prompt_tokens + len(workload.requests)))
    if "auto_switch_to_flash" in {f.name for f in dataclasses.fields(config)}:
        config.auto_switch_to_flash = False
    return config


def _measured(engine: str, workload: Workload, counts: list[int], seconds: float, errors: list[str | None]) -> Measured:
    problems = []
    for i, (request, count, error) in enumerate(zip(workload.requests, counts, errors, strict=True)):
        if error is not None or count != request.max_new:
            why = "" if error is None else f" ({error})"
            problems.append(f"request {i}: {count} tokens instead of {request.max_new}{why}")
    return Measured(engine, sum(counts), seconds, problems=problems)


def _latencies(started: float, times: Iterable[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Times to the first token, and gaps between tokens."""
    ttft: list[float] = []
    itl: list[float] = []
    for of_request in times:
        ttft += [t - started for t in of_request[:1]]
        itl += [after - before for before, after in pairwise(of_request)]
    return ttft, itl
