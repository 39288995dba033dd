"""What the answers of both APIs have in common: ids, usage, and how a sequence has ended."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from hf_cb.core import Delta, GenerationOutput, RequestMetrics
from hf_cb.serving.errors import shutting_down, timed_out


class Answer(Protocol):
    """The answer to one HTTP request, whole or in chunks. Sequences are numbered over all prompts: `n` for each."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        ...

    def chunks(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        """What a delta of that sequence adds to the stream."""
        ...

    def last_chunk(self, metrics: Sequence[RequestMetrics]) -> dict[str, Any] | None:
        """The chunk with the usage, where it was asked for."""
        ...


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def usage(metrics: Sequence[RequestMetrics], completion_tokens: int) -> dict[str, Any]:
    """Tokens of all prompts, each counted once, and of all answers."""
    prompt_tokens = sum(m.prompt_tokens for m in metrics)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(m.cached_tokens for m in metrics)},
    }


def finish_reason(reason: str | None) -> str | None:
    """In OpenAI's words; a request that was ended by the server has no answer, but an error.

    Raises:
        ApiError: 503 or 504.
    """
    if reason == "cancelled":
        raise shutting_down()
    if reason == "timeout":
        raise timed_out()
    return reason
