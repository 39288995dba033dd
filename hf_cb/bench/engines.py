"""The engines in this process, on one loaded model. All make the same tokens: greedy, and deaf to end tokens.

A clock runs from the first submission to the last result, and starts when managers and caches are made.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_cb.bench.measured import BenchEngine, CannotRun, Measured, latencies, measured
from hf_cb.bench.memory import peak_rss, reset_peak
from hf_cb.bench.peer import PEERS, Peer
from hf_cb.bench.workload import BenchRequest, Workload
from hf_cb.config import EngineConfig
from hf_cb.errors import OptionError
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.manager.session import open_manager
from hf_cb.models.plan import Need
from hf_cb.patching import accelerate, restore

# spelled out, since a model's own generation config may sample or penalise
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "repetition_penalty": 1.0}
TRACE_STEPS = 2**18  # enough for every step of a run to leave its record


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
        reset_peak([os.getpid()])
        began = time.perf_counter()
        accelerate(self.model)
        try:
            with open_manager(self.model, self.config, need=need, warmup=True) as manager:
                started = time.perf_counter()
                handles = [
                    manager.submit(r.prompt, max_new_tokens=r.max_new, **GREEDY) for r in _arriving(workload, started)
                ]
                outputs = [handle.outputs()[0] for handle in handles]
                seconds = time.perf_counter() - started
                steps = manager.trace()
        finally:
            restore(self.model)
        tokens = [list(o.generated_tokens) for o in outputs]
        result = measured(self.name, workload, tokens, seconds, [o.error for o in outputs])
        result.ttft, result.itl = latencies(workload, ([t - started for t in o.timestamps or []] for o in outputs))
        result.steps, result.startup_s = steps, started - began
        result.peak_bytes = peak_rss([os.getpid()])
        return result


class Generate:
    """`model.generate` on fixed, padded batches in input order; each runs until its longest output ends."""

    name = "generate"

    def __init__(self, model: Any, batch_size: int = 16) -> None:
        self.model = model
        self.batch_size = batch_size

    def run(self, workload: Workload) -> Measured:
        if not workload.at_once:
            raise CannotRun("it takes all requests at once, none that arrive later")
        reset_peak([os.getpid()])
        tokens: list[list[int]] = []
        times: list[list[float]] = []
        started = time.perf_counter()
        for begin in range(0, len(workload.requests), self.batch_size):
            batch = workload.requests[begin : begin + self.batch_size]
            clock = _Clock(started)
            made = self._generate([r.prompt for r in batch], max(r.max_new for r in batch), clock)
            tokens += [ids[: r.max_new] for r, ids in zip(batch, made, strict=True)]
            times += [clock.times[: r.max_new] for r in batch]
        seconds = time.perf_counter() - started
        result = measured(self.name, workload, tokens, seconds)
        result.ttft, result.itl = latencies(workload, times)
        result.peak_bytes = peak_rss([os.getpid()])
        return result

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], max_new: int, clock: _Clock) -> list[list[int]]:
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
        return output[:, width:].tolist()


class TransformersBatching:
    """transformers' own continuous batching, with the attention that the model was loaded with."""

    name = "transformers"

    def __init__(self, model: Any, max_num_seqs: int | None = None, prefix_caching: bool = True) -> None:
        self.model = model
        self.max_num_seqs, self.prefix_caching = max_num_seqs, prefix_caching

    def run(self, workload: Workload) -> Measured:
        longest = max(r.max_new for r in workload.requests)
        config = GenerationConfig(max_new_tokens=longest, pad_token_id=0, **GREEDY)
        outputs: dict[str, Any] = {}
        reset_peak([os.getpid()])
        began = time.perf_counter()
        with self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=self._config(workload)
        ) as manager:
            if isinstance(manager, ContinuousBatchingManager):
                raise OptionError("hf_cb.patch() has replaced transformers' own batching: unpatch first.")
            started = time.perf_counter()
            with _submitting(manager, workload, started) as ids:
                while len(outputs) < len(workload.requests):
                    output = manager.get_result(timeout=1)
                    if output is None and not manager.is_running():
                        break  # it has died: what is missing is reported
                    if output is not None and output.is_finished():
                        outputs[output.request_id] = output
                seconds = time.perf_counter() - started
        found = [outputs.get(i) for i in ids] + [None] * (len(workload.requests) - len(ids))
        tokens = [[] if o is None else list(o.generated_tokens) for o in found]
        errors = ["no result" if o is None else o.error for o in found]
        result = measured(self.name, workload, tokens, seconds, errors)
        times = [[t - started for t in (o.timestamps or [])] if o else [] for o in found]
        result.ttft, result.itl = latencies(workload, times)
        result.startup_s = started - began
        result.peak_bytes = peak_rss([os.getpid()])
        return result

    def _config(self, workload: Workload) -> ContinuousBatchingConfig:
        """Sizes that hold the whole workload; by itself, transformers takes most of the machine's memory."""
        config = ContinuousBatchingConfig()
        page = getattr(config, "page_size", None) or config.block_size  # the name in 5.17
        config.num_blocks = sum(1 + -(-(len(r.prompt) + r.max_new) // page) for r in workload.requests)
        # its own default, which 5.17 forgets where num_blocks is given; never more than there is to compute
        config.max_batch_tokens = max(256, min(8192, workload.prompt_tokens + len(workload.requests)))
        config.allow_block_sharing = self.prefix_caching
        names = {f.name for f in dataclasses.fields(config)}
        if "auto_switch_to_flash" in names:
            config.auto_switch_to_flash = False
        if "max_requests_per_batch" in names and self.max_num_seqs is not None:
            config.max_requests_per_batch = self.max_num_seqs
        return config


HERE = (HfCb.name, Generate.name, TransformersBatching.name)
NAMES = (*HERE, *PEERS)


def make_engines(
    names: Sequence[str], model: Any, peers: Mapping[str, Callable[[], Peer]] | None = None, **options: Any
) -> list[BenchEngine]:
    """The engines by name, on one model, in this order.

    Args:
        peers: makes the engines that run in processes of their own, by name.
        options: for hf_cb; what of it the others know, they get too.

    Raises:
        OptionError: an unknown name or option, or a peer without a maker.
    """
    engines: list[BenchEngine] = []
    for name in names:
        if name == HfCb.name:
            engines.append(HfCb(model, **options))
        elif name == Generate.name:
            engines.append(Generate(model))
        elif name == TransformersBatching.name:
            both = {key: options[key] for key in ("max_num_seqs", "prefix_caching") if key in options}
            engines.append(TransformersBatching(model, **both))
        elif peers is not None and name in peers:
            engines.append(peers[name]())
        elif name in PEERS:
            raise OptionError(f"engine {name} runs in a Python of its own: say which, by --env {name}=PYTHON.")
        else:
            raise OptionError(f"engine {name!r} is unknown; the engines are {', '.join(NAMES)}.")
    return engines


def _arriving(workload: Workload, started: float) -> Iterator[BenchRequest]:
    """The requests, each when it arrives."""
    for request in workload.requests:
        if request.arrival:
            time.sleep(max(0.0, started + request.arrival - time.perf_counter()))
        yield request


@contextmanager
def _submitting(manager: Any, workload: Workload, started: float) -> Iterator[list[str]]:
    """transformers' manager gets the requests; its results must be fetched meanwhile if some arrive later."""
    ids: list[str] = []

    def submit() -> None:
        for r in _arriving(workload, started):
            ids.append(manager.add_request(r.prompt, max_new_tokens=r.max_new, record_timestamps=True))

    if workload.at_once:
        submit()
        yield ids
        return
    thread = threading.Thread(target=submit, name="hf_cb-arrivals", daemon=True)
    thread.start()
    yield ids
    thread.join()


class _Clock(StoppingCriteria):
    """Notes when each token of a batch is there, and stops nothing."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter() - self.started)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
