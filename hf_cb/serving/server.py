"""Running the application until it is told to end, and ending in good order."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from hf_cb.errors import OptionError
from hf_cb.serving.app import make_app
from hf_cb.serving.service import Service

if TYPE_CHECKING:
    from uvicorn import Server

logger = logging.getLogger("hf_cb.server")
POLL_S = 0.05
GRACE_S = 5  # for connections to be told, once nothing runs any more


def serve(service: Service, host: str, port: int, when_ready: Callable[[str], None] | None = None) -> None:
    """Serves until SIGTERM or Ctrl-C, or until `stop` is called on what `when_ready` was given.

    Then new requests get 503, and what runs has `shutdown_timeout` seconds to finish; a second signal ends that too.

    Args:
        port: 0 for any that is free.
        when_ready: called with the server's address once it listens.

    Raises:
        OptionError: it cannot listen there.
    """
    server = make_server(service, host, port)
    try:
        asyncio.run(_run(server, service, when_ready))
    except SystemExit as stop:  # uvicorn has logged why
        raise OptionError(f"The server cannot listen on {host}:{port}: is something else there?") from stop
    finally:
        service.close()


def make_server(service: Service, host: str, port: int) -> Server:
    import uvicorn

    config = uvicorn.Config(
        make_app(service),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        log_level="warning",
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(config)


async def _run(server: Server, service: Service, when_ready: Callable[[str], None] | None) -> None:
    loop = asyncio.get_running_loop()
    signals = asyncio.Queue[int]()

    def on_signal(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(signals.put_nowait, number)

    with _handling(on_signal):
        running = asyncio.ensure_future(server._serve())
        while not server.started and not running.done():
            await asyncio.sleep(POLL_S)
        if not running.done() and when_ready is not None:
            host, port = server.servers[0].sockets[0].getsockname()[:2]
            when_ready(f"http://{host}:{port}")
        told = asyncio.ensure_future(signals.get())
        await asyncio.wait({told, running}, return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            await drain(service, signals)
        told.cancel()
        server.should_exit = True
        await running


async def drain(service: Service, signals: asyncio.Queue[int]) -> None:
    """Takes no more requests, and waits for those that run: until their time is over, or another signal comes."""
    service.draining = True
    logger.info("Ending: %d requests are still being answered", service.gate.inside)
    loop = asyncio.get_running_loop()
    end = loop.time() + service.config.shutdown_timeout
    while service.gate.inside and loop.time() < end and signals.empty():
        await asyncio.sleep(POLL_S)
    if service.gate.inside:
        logger.warning("Ending: %d requests are cut short", service.gate.inside)
        service.aborting.set()


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGTERM and SIGINT go to the handler, where this thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {s: signal.signal(s, handler) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
