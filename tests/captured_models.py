"""Models whose decode steps are recorded, by a stand-in for a GPU's graphs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from far_device import DEVICE, move
from recorded import Recorded, TensorBackend, draw_by_hash
from running import run_all

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.engine import Engine
from hf_cb.models.plan import plan_paged
from hf_cb.models.recorded.captured import CapturedModel


class Harness:
    """A model, an engine whose decode steps are recorded, and the recordings. `far`: on the device of `far_device`."""

    def __init__(self, model: Any, far: bool = False, host_blocks: int = 0, **options: Any) -> None:
        self.model, self.captures, self.pools = model, [], 0
        options = dict(block_size=4, max_num_seqs=4, max_model_len=64) | options
        plan = plan_paged(model, EngineConfig(**options))
        config, trace, backend = dataclasses.replace(plan.config, host_blocks=host_blocks), plan.trace, TensorBackend()
        if far:
            move(model)
            trace = dataclasses.replace(trace, layers=[dataclasses.replace(x, device=DEVICE) for x in trace.layers])
            backend.clears = False
        self.runner = CapturedModel(
            self._captures,
            draw_by_hash,
            config.max_num_seqs,
            -(-config.max_model_len // config.block_size),
            model,
            trace,
            plan.groups,
            backend,
            config.num_blocks,
            config.block_size,
            host_blocks,
        )
        self.engine = Engine(self.runner, config, sampler=DeviceSampler(draw_by_hash))

    def _captures(self, device: torch.device) -> Any:
        self.pools += 1
        return self._capture

    def _capture(self) -> Recorded:
        self.captures.append(Recorded())
        return self.captures[-1]

    @property
    def replays(self) -> int:
        return sum(capture.replays for capture in self.captures)

    def run(self, requests: list[Request]) -> None:
        run_all(self.engine, requests)

    def tokens(self, prompts: list[list[int]], new: int = 10) -> list[list[int]]:
        requests = [Request(f"r{i}", p, SamplingParams(new)) for i, p in enumerate(prompts)]
        self.run(requests)
        return [r.output_ids for r in requests]
