"""Running the application until it is told to end, and ending in good order."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from hf_cb.errors import OptionError
from hf_cb.serving.app import make_app
from hf_cb.serving.service import Service

if TYPE_CHECKING:
    from uvicorn import Server

logger = logging.getLogger("hf_cb.server")
POLL_S = 0.05
GRACE_S = 5  # for connections to be told, once nothing runs any more
BACKLOG = 2048  # connections that wait to be accepted


def serve(service: Service, host: str, port: int, when_ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Then new requests get 503, and what runs has `shutdown_timeout` seconds to finish; a second signal ends that too.

    Args:
        port: 0 for any that is free.
        when_ready: called with the server's address once it listens.

    Raises:
        OptionError: it cannot listen there.
    """
    try:
        listener = listen(host, port)
        try:
            asyncio.run(_run(service, listener, when_ready))
        finally:
            listener.close()
    finally:
        service.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; OptionError says why there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise OptionError(f"The server cannot listen on {host}:{port}: {error}.") from None


def make_server(service: Service, on_signal: Callable[[], object]) -> Server:
    """uvicorn's server, which tells of signals instead of heeding them at once."""
    import uvicorn

    class Obedient(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            on_signal()

    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        access_log=False,
        log_level="warning",
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return Obedient(config)


async def _run(service: Service, listener: socket.socket, when_ready: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    signals = asyncio.Queue[None]()
    server = make_server(service, lambda: loop.call_soon_threadsafe(signals.put_nowait, None))
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started and not running.done():
        await asyncio.sleep(POLL_S)
    if running.done():
        return await running
    host, port = listener.getsockname()[:2]
    when_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    told = asyncio.ensure_future(signals.get())
    await asyncio.wait({told, running}, return_when=asyncio.FIRST_COMPLETED)
    if told.done():
        await drain(service, signals)
    told.cancel()
    server.should_exit = True
    await running


async def drain(service: Service, signals: asyncio.Queue[None]) -> None:
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
