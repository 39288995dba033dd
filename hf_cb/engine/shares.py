"""The query tokens of one step, as they are given out."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_cb.core import Request
from hf_cb.steps import PlanPart


@dataclass
class Shares:
    """What is left of a step's `tokens`, and of those the most that prompts may have; and who has got which part."""

    tokens: int
    prompt_tokens: int
    parts: dict[Request, PlanPart] = field(default_factory=dict)

    def room(self, request: Request) -> int:
        """Most tokens that this request may have."""
        return self.tokens if request.is_decoding else min(self.tokens, self.prompt_tokens)

    def add(self, part: PlanPart) -> None:
        self.parts[part.request] = part
        self._count(part, -1)

    def take_back(self, request: Request) -> None:
        """Its part, if it has got one, goes to others."""
        part = self.parts.pop(request, None)
        if part is not None:
            self._count(part, 1)

    def _count(self, part: PlanPart, sign: int) -> None:
        self.tokens += sign * part.num_tokens
        if not part.was_decoding:
            self.prompt_tokens += sign * part.num_tokens
