"""Draft tokens: guesses that a step verifies all at once.

Each drafted position is sampled like any other, with the request's own ids up to there and the same seed and position,
so a draft changes how many steps an answer takes and never its tokens.
"""

from __future__ import annotations

from typing import Protocol

from hf_cb.core import Request


class DraftSource(Protocol):
    """Guesses the next tokens of a decoding request: at most `at_most` of them, or none."""

    def propose(self, request: Request, at_most: int) -> list[int]: ...
