"""The HTTP application: its paths, and what happens to every request at the door."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from hf_cb.serving.errors import CLIENT_GONE, ApiError, as_api_error, shutting_down
from hf_cb.serving.intake import Submission
from hf_cb.serving.limits import read_body
from hf_cb.serving.metrics import CONTENT_TYPE, HttpCounts, exposition
from hf_cb.serving.service import Service
from hf_cb.serving.streaming import Receive, Send, Watch, as_json, event, send_error_event, send_events

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger("hf_cb.server")
BODY_S = 60  # for a request's body to arrive
Scope = dict[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")
_FINE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def make_app(service: Service) -> FastAPI:
    """The application of one service; ASGI."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response
    from starlette.exceptions import HTTPException
    from starlette.routing import BaseRoute, Route

    counts, began = HttpCounts(), int(time.time())
    model = {"id": service.config.name, "object": "model", "created": began, "owned_by": "hf_cb"}
    model["max_model_len"] = service.intake.max_model_len

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != service.config.name:
            error = ApiError(404, f"The model {name!r} is not served here.", "model", "model_not_found")
            return JSONResponse(error.body(), error.status)
        return JSONResponse(model)

    async def health(request: Request) -> Response:
        problem = service.problem()
        return JSONResponse({"status": "ok" if problem is None else problem}, 200 if problem is None else 503)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(exposition(service, counts), media_type=CONTENT_TYPE)

    async def nowhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
        return JSONResponse(found.body(), found.status, error.headers)

    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", Generation(service, is_chat=True), methods=["POST"]),
        Route("/v1/completions", Generation(service, is_chat=False), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    # /docs would load scripts from the network
    app = FastAPI(title="hf_cb", docs_url=None, redoc_url=None, openapi_url=None, routes=routes)
    app.add_exception_handler(HTTPException, nowhere)
    app.add_middleware(Door, service=service, counts=counts)
    return app


class Door:
    """What happens to every request: an id, the key, errors in one shape, a line in the log."""

    def __init__(self, app: App, service: Service, counts: HttpCounts) -> None:
        self.app, self.service, self.counts = app, service, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _FINE_ID.fullmatch(given) else uuid.uuid4().hex
        scope["hf_cb"] = said = {"request_id": request_id}
        began, status = time.monotonic(), 0

        async def send_with_id(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check_key(scope["path"], headers)
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            found = self._as_answer(error, request_id)
            if status == 0 and found.status != CLIENT_GONE:
                await _send_error(send_with_id, found)
            elif status:
                await send_error_event(send_with_id, found)
            status = found.status
            # a message may quote a prompt, which is not for the log
            said["error"] = found.message if found.status >= 500 else found.code or found.kind
            if found.param is not None:
                said["param"] = repr(found.param[:80])  # perhaps a client's own word
        path = scope["path"] if scope["path"] in PATHS else "other"
        self.counts.add(path, status)
        level = logging.DEBUG if path in ("/health", "/metrics") else logging.INFO
        more = "".join(f" {name}={value}" for name, value in said.items() if name != "request_id")
        seconds = time.monotonic() - began
        asked = path if path != "other" else repr(scope["path"])  # a line break in it must not make two lines
        logger.log(level, "%s %s %s %d %.3f s%s", request_id, scope["method"], asked, status, seconds, more)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        key = self.service.config.api_key
        if key is None or not path.startswith("/v1"):
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
            message = "No API key was given, or a wrong one: send it as `Authorization: Bearer KEY`."
            raise ApiError(401, message, code="invalid_api_key")

    def _as_answer(self, error: Exception, request_id: str) -> ApiError:
        found = as_api_error(error)
        if found.status == 500:
            logger.error("%s failed", request_id, exc_info=error)
        if found.status == 429:
            found.retry_after = self.service.seconds_to_wait()
        return found


class Generation:
    """`/v1/chat/completions` and `/v1/completions`."""

    def __init__(self, service: Service, is_chat: bool) -> None:
        self.service, self.is_chat = service, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, said = self.service, scope["hf_cb"]
        service.refuse_if_unavailable()
        with service.gate.entered():
            body = await self._body(scope, receive)
            watch = Watch(receive, service.aborting, shutting_down)
            submission: Submission | None = None
            try:
                own_id = f"{said['request_id']}-{uuid.uuid4().hex[:8]}"  # a client may use its ids again
                submission = await watch.over(self._submitted(body, own_id))
                if submission.request.stream:
                    await self._stream(submission, watch, send)
                else:
                    await watch.over(submission.finished())
                    answer = await service.in_worker(submission.whole)
                    await _send_json(send, 200, answer)
            finally:
                watch.close()
                if submission is not None:
                    submission.cancel()
                    said["tokens"] = submission.summary()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        from fastapi import Request
        from starlette.requests import ClientDisconnect

        request = Request(scope, receive)
        limit = self.service.config.max_body_bytes
        try:
            async with asyncio.timeout(BODY_S):
                return await read_body(request.stream(), request.headers.get("content-length"), limit)
        except ClientDisconnect:
            raise ApiError(CLIENT_GONE, "The client has gone.") from None
        except TimeoutError:
            raise ApiError(408, f"The request's body did not come within {BODY_S} s.") from None

    async def _submitted(self, body: bytes, own_id: str) -> Submission:
        """Submits in a worker; what a cancelled wait for it leaves behind is cancelled too."""
        job = self.service.begin_in_worker(self._submit, body, own_id)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            job.add_done_callback(_take_back)  # first: the server may end, and with it the wait for the end of this
            await asyncio.gather(asyncio.wrap_future(job), return_exceptions=True)
            raise

    def _submit(self, data: bytes, own_id: str) -> Submission:
        """All that takes time with a long prompt; in a worker."""
        try:
            body = json.loads(data, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"The request's body is no JSON: {error}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise ApiError(400, "The request's body must be a JSON object.", code="invalid_json")
        intake = self.service.intake
        return intake.submit(intake.read(body, self.is_chat), own_id)

    async def _stream(self, submission: Submission, watch: Watch, send: Send) -> None:
        """The first chunk is waited for before anything is sent, so that what fails before it has a status."""
        async with aclosing(_events(submission)) as events:
            first = await watch.over(anext(events))
            await watch.over(send_events(send, first, events))


def _take_back(job: Future[Submission]) -> None:
    """Nobody waits for its answer."""
    if not job.cancelled() and job.exception() is None:
        job.result().cancel()


async def _events(submission: Submission) -> AsyncGenerator[bytes]:
    async with aclosing(submission.chunks()) as chunks:
        async for chunk in chunks:
            yield event(chunk)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


async def _send_error(send: Send, error: ApiError) -> None:
    headers = [(b"retry-after", str(error.retry_after).encode())] if error.retry_after else []
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await _send_json(send, error.status, error.body(), headers)


async def _send_json(
    send: Send, status: int, body: dict[str, Any], headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    data = as_json(body)
    kind = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": kind + (headers or [])})
    await send({"type": "http.response.body", "body": data, "more_body": False})
