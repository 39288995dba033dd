"""The query tokens of one step, as they are given out."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_cb.core import Request
from hf_cb.steps import PlanPart


@dataclass
class Shares:
    """What is left of a step's `tokens`, the most of them that prompts may have, and of `rows` that score a prompt; and
    who has got which part."""

    tokens: int
    prompt_tokens: int
    rows: int  # of prompts whose every token is scored
    parts: dict[Request, PlanPart] = field(default_factory=dict)

    def room(self, request: Request) -> int:
        """Most tokens that this request may have."""
        if request.is_decoding:
            return self.tokens
        most = min(self.tokens, self.prompt_tokens)
        return min(most, self.rows) if request.scores_prompt else most

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
        self.rows += sign * part.prompt_rows
        if not part.was_decoding:
            self.prompt_tokens += sign * part.num_tokens
