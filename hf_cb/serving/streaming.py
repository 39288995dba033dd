"""Server-sent events, and giving up when nobody is there to read any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from hf_cb.serving.errors import CLIENT_GONE, ApiError, as_api_error

T = TypeVar("T")
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]
DONE = b"data: [DONE]\n\n"
# a proxy that collects an answer before it passes it on would undo streaming
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
HEADERS += [(b"x-accel-buffering", b"no")]


class Watch:
    """Ends work when the client has gone, or when the server must end. One task for the whole of a request."""

    def __init__(self, receive: Receive, aborting: asyncio.Event, abort_error: Callable[[], ApiError]) -> None:
        self._gone = asyncio.ensure_future(_disconnected(receive))
        self._aborted = asyncio.ensure_future(aborting.wait())
        self._abort_error = abort_error

    async def over(self, work: Awaitable[T]) -> T:
        """The work's result, unless it is in vain: then it is cancelled, and ApiError says why."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone, self._aborted}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._gone.done():
            raise ApiError(CLIENT_GONE, "The client has gone.")
        raise self._abort_error()

    def close(self) -> None:
        self._gone.cancel()
        self._aborted.cancel()


async def _disconnected(receive: Receive) -> None:
    """Returns when the connection is closed; the body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def as_json(data: dict[str, Any]) -> bytes:
    """UTF-8; half of a surrogate pair, which that cannot hold, stays the escape that it came as."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + as_json(data) + b"\n\n"


async def send_events(send: Send, first: bytes, events: AsyncGenerator[bytes]) -> None:
    """Sends a whole event stream; nothing was sent before."""
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    async for data in events:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def send_error_event(send: Send, error: BaseException) -> None:
    """The end of a stream that has begun and cannot go on; clients raise it."""
    await send({"type": "http.response.body", "body": event(as_api_error(error).body()), "more_body": False})
