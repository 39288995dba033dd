"""A runner without a model: the next token is always the last one plus 1. Remembers what each step contained."""

from __future__ import annotations

from typing import Any

import torch

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams
from hf_cb.engine.engine import Engine
from hf_cb.models.groups import LayerGroup
from hf_cb.models.sending import to_device
from hf_cb.sizes import ResolvedConfig, Surroundings, resolve
from hf_cb.steps import StepBatch

VOCAB = 1000


class FakeRunner:
    groups = [LayerGroup(layers=(0,), storages=(0,))]
    device = torch.device("cpu")
    shares_prefixes = overlaps = True

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []
        self.key: object = 0

    def forward(self, batch: StepBatch) -> torch.Tensor:
        batch = to_device(batch, self.device)
        self.batches.append(batch)
        next_ids = (batch.input_ids[batch.logits_rows] + 1) % VOCAB
        return torch.nn.functional.one_hot(next_ids, VOCAB).float()

    def new_requests(self) -> None: ...

    def warm_up(self) -> None: ...

    def weights_key(self) -> object:
        return self.key

    def key_regime(self, request: Request) -> object:
        return None

    def forget(self, request: Request) -> None:
        pass


def resolved(**options: Any) -> ResolvedConfig:
    options = {"block_size": 4, "num_blocks": 64} | options
    return resolve(EngineConfig(**options), Surroundings(1024, 2**30, "cpu", lambda size: size))


def make_engine(**options: Any) -> Engine:
    parts = {k: options.pop(k) for k in ("sampler", "drafts", "clock") if k in options}
    policy = options.pop("policy", None)
    return Engine(FakeRunner(), resolved(**options), policy, **parts)


def request(name: str, prompt: list[int], new: int = 4, **options: Any) -> Request:
    return Request(name, prompt, SamplingParams(new), **options)


def run(engine: Engine, requests: list[Request]) -> list[list[tuple[str, int]]]:
    """Runs requests to their end; for each step who was in it, and with how many tokens."""
    for r in requests:
        engine.admit(r)
    steps = []
    while engine.has_work:
        flight = engine.launch()
        assert flight is not None
        steps.append([(p.request.request_id, p.num_tokens) for p in flight.plan.parts])
        engine.commit(flight)
    return steps
