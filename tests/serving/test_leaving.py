"""Clients that go away: their requests end, wherever they were, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from running import wait_until
from servers import openai, served

from hf_cb.errors import QueueFullError
from hf_cb.serving import app, streaming
from hf_cb.serving.errors import ApiError

HELLO = [{"role": "user", "content": "hello"}]


def connect(server, stream: bool, missing: int = 0) -> socket.socket:
    """A connection on which a request for 400 tokens was sent, but for so many of its last bytes."""
    body = json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 400, "stream": stream}).encode()
    where = server.url.removeprefix("http://")
    connection = socket.create_connection(where.split(":"), timeout=20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[: len(body) - missing])
    return connection


def wait_for(condition) -> None:
    assert wait_until(condition, 20)


@pytest.mark.parametrize("stream", (True, False), ids=("streaming", "whole"))
def test_before_the_first_token(stream) -> None:
    with served() as server:
        with server.manager.pause():
            connection = connect(server, stream)
            wait_for(lambda: len(server.manager.registry) == 1)
            connection.close()
            wait_for(lambda: server.service.gate.inside == 0)
        server.wait_until_idle()
        assert server.manager.stats().tokens == 0


@pytest.mark.parametrize("what", ("streaming", "whole", "refused"))
def test_while_it_is_being_submitted(what, monkeypatch, caplog) -> None:
    """It ends with its client, though nobody ever held it and something still does; nobody hears of a refusal."""
    submitted, gone, may_return, kept = threading.Event(), threading.Event(), threading.Event(), []
    disconnected = streaming._disconnected

    async def seen(receive):
        await disconnected(receive)
        gone.set()

    monkeypatch.setattr(streaming, "_disconnected", seen)
    with served() as server:
        submit = server.service.intake.submit

        def slow(*args):
            kept.append(submit(*args))
            submitted.set()
            assert may_return.wait(20)
            if what == "refused":
                kept.pop().cancel()
                raise ApiError(400, "refused")
            return kept[0]

        monkeypatch.setattr(server.service.intake, "submit", slow)
        with server.manager.pause():
            connection = connect(server, what == "streaming")
            assert submitted.wait(20)
            connection.close()
            assert gone.wait(20)
            may_return.set()
            wait_for(lambda: server.service.gate.inside == 0)
        server.wait_until_idle()
        assert server.manager.stats().tokens == 0
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_the_server_ends_while_a_request_whose_client_has_left_is_being_submitted() -> None:
    begun, may_return, cancelled = (threading.Event() for _ in range(3))

    def submit(*_):
        begun.set()
        assert may_return.wait(20)
        return SimpleNamespace(cancel=cancelled.set)

    async def left(pool) -> None:
        generation = app.Generation(SimpleNamespace(begin_in_worker=pool.submit), is_chat=False)
        generation._submit = submit
        waiting = asyncio.ensure_future(generation._submitted(b"", ""))
        await asyncio.to_thread(begun.wait, 20)
        while not waiting.done():  # its client has gone, and then the server ends
            waiting.cancel()
            await asyncio.sleep(0)

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(left(pool))
        may_return.set()
    assert cancelled.is_set()


def test_one_of_several_prompts_is_not_taken(monkeypatch) -> None:
    """The others end too, though something still holds them."""
    kept = []
    with served() as server:
        submit = server.manager.submit

        def once(*args, **options):
            if kept:
                raise QueueFullError("no room")
            kept.append(submit(*args, **options))
            return kept[0]

        monkeypatch.setattr(server.manager, "submit", once)
        with server.manager.pause(), pytest.raises(openai.RateLimitError, match="no room"):
            server.client().completions.create(model="tiny", prompt=["a", "b"])
        server.wait_until_idle()
        assert server.manager.stats().tokens == 0


def test_an_answer_that_cannot_be_made(monkeypatch) -> None:
    """That is our fault and not the request's, which ends."""
    kept = []
    with served() as server:
        submit = server.manager.submit
        monkeypatch.setattr(
            server.manager, "submit", lambda *a, **options: kept.append(submit(*a, **options)) or kept[0]
        )
        monkeypatch.setattr(server.service.intake, "_answer", lambda *_: len(None))
        with server.manager.pause(), pytest.raises(openai.InternalServerError):
            server.client().completions.create(model="tiny", prompt="a")
        server.wait_until_idle()
        assert server.manager.stats().tokens == 0


@pytest.mark.parametrize("stream", (True, False), ids=("streaming", "whole"))
def test_in_the_middle(stream) -> None:
    with served(engine={"max_num_seqs": 2}) as server:
        connection = connect(server, stream)
        wait_for(lambda: server.manager.stats().tokens > 3)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
        server.wait_until_idle()
        assert server.manager.stats().tokens < 400


def test_in_the_middle_of_the_body(monkeypatch) -> None:
    with served() as server:
        for gone in (True, False):
            connection = connect(server, stream=True, missing=5)
            wait_for(lambda: server.service.gate.inside == 1)
            if gone:
                connection.close()
                wait_for(lambda: server.service.gate.inside == 0)
                monkeypatch.setattr(app, "BODY_S", 0.05)  # the next one does not wait for long
            else:
                assert connection.recv(100).startswith(b"HTTP/1.1 408")
                connection.close()
        server.wait_until_idle()
        assert server.manager.stats().steps == 0


def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    with served() as server:
        idle = connect(server, stream=True)
        answer = server.client().chat.completions.create(model="tiny", messages=HELLO, max_tokens=5)
        assert answer.usage.completion_tokens == 5
        wait_for(lambda: server.manager.stats().running == 0)
        idle.close()
        server.wait_until_idle()


def test_200_streams_and_half_of_them_leave() -> None:
    """At a random moment each; those that stay have all they asked for."""
    chance = random.Random(0)

    async def one(client, leaves_after: int | None, count: int) -> None:
        stream = await client.completions.create(
            model="tiny", prompt="x" * count, max_tokens=count, stream=True, stream_options={"include_usage": True}
        )
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if leaves_after is not None and len(chunks) > leaves_after:
                await stream.close()
                return
        assert chunks[-1].usage.completion_tokens == count

    async def everybody(server) -> None:
        async with server.async_client() as client:
            leaving = [chance.randrange(6) if i % 2 else None for i in range(200)]
            await asyncio.gather(*(one(client, after, chance.randint(2, 30)) for after in leaving))

    with served(engine={"max_num_seqs": 32}) as server:
        asyncio.run(everybody(server))
        server.wait_until_idle()
        assert server.manager.stats().finished == 200
