"""A step between its launch and its commit."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_cb.core import Request
from hf_cb.engine.logprobs import Prompts
from hf_cb.engine.sampler import Drawing, Sampled
from hf_cb.steps import Drawn, StepPlan


@dataclass(frozen=True)
class Unread:
    """Tokens that are sampled and not yet among their requests' ids: each request's row, and the tokens `[S]` int64 on
    the device, or as a list where the host has them."""

    row_of: dict[Request, int]
    tokens: Tensor | list[int]


@dataclass
class InFlight:
    """A launched step. `logits` until it is sampled, then what was; `error` is what its forward raised."""

    plan: StepPlan
    times: list[float]  # before plan, before build, before forward, before sample, after sample
    logits: Tensor | Drawn | None = None
    prompts: Prompts = field(default_factory=Prompts)
    sampled: Drawing | list[list[Sampled]] = field(default_factory=list)
    error: Exception | None = None

    def read(self) -> list[list[Sampled]]:
        """What was sampled, part by part; waits for the device."""
        if isinstance(self.sampled, Drawing):
            self.sampled = self.sampled.read()
        return self.sampled

    def unread(self) -> Unread:
        """What the next step is built on."""
        row_of, row = {}, 0
        for part in self.plan.parts:
            row += part.samples
            if part.samples:
                row_of[part.request] = row - 1
        if isinstance(self.sampled, Drawing):
            return Unread(row_of, self.sampled.tokens)
        return Unread(row_of, [s.token_id for found in self.sampled for s in found])
