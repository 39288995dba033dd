"""What one server takes: sizes of bodies, requests at once, and how long a refused client should wait."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hf_cb.serving.errors import ApiError

MAX_WAIT_S = 60


@dataclass(frozen=True)
class ServerConfig:
    """The server's own options.

    Args:
        name: the model's name in requests and answers.
        api_key: what `Authorization: Bearer ...` must say for paths under /v1; None: nothing is asked.
        max_body_bytes: of a request.
        max_requests: HTTP requests that are being answered at once, streams and waiting ones too.
        max_output_tokens: most that a request may ask for; None: what the model takes.
        request_timeout: seconds after which a request ends with an error; None: never.
        shutdown_timeout: seconds for what runs when the server is told to end.
    """

    name: str
    api_key: str | None = None
    max_body_bytes: int = 16 * 2**20
    max_requests: int = 2048
    max_output_tokens: int | None = None
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0


async def read_body(stream: AsyncIterator[bytes], announced: str | None, limit: int) -> bytes:
    """A request's body; ApiError 413 as soon as it is known to be longer than `limit`."""
    too_long = ApiError(413, f"The request's body is longer than {limit} bytes.", code="body_too_large")
    if announced is not None and announced.isdecimal() and int(announced) > limit:
        raise too_long
    parts, size = [], 0
    async for part in stream:
        size += len(part)
        if size > limit:
            raise too_long
        parts.append(part)
    return b"".join(parts)


class Gate:
    """Counts the requests inside, and how fast they leave. Belongs to the event loop's thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self._left: deque[float] = deque(maxlen=64)  # when, on time.monotonic()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside; ApiError 429 where there is no room."""
        if self.inside >= self.limit:
            message = f"{self.inside} requests are being answered and the server takes {self.limit}: try again later."
            raise ApiError(429, message, code="server_full")
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self._left.append(time.monotonic())

    def seconds_to_wait(self, waiting: int) -> int:
        """In how many seconds as many requests as wait now will have left, at the pace of the last ones."""
        if len(self._left) < 2:
            return 1
        pace = len(self._left) / max(1e-3, time.monotonic() - self._left[0])
        return min(MAX_WAIT_S, max(1, math.ceil(waiting / pace)))
