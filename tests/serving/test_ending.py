"""Health, and the end of a server: when its generation thread dies, and when it is told to end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from byte_models import byte_model, byte_tokenizer
from servers import openai, served

from hf_cb.cli import main
from hf_cb.errors import OptionError
from hf_cb.serving.server import drain, serve

HELLO = [{"role": "user", "content": "hello"}]


def health(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status, json.load(answer)["status"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["status"]


def samples(url: str) -> dict[str, float]:
    """What Prometheus reads: names with labels, and values."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/plain")
        lines = answer.read().decode().splitlines()
    assert all(lines)
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_a_dead_loop_turns_health_red(monkeypatch) -> None:
    with served() as server:
        assert health(server.url) == (200, "ok")
        client = server.client()
        with server.manager.pause():
            errors: list[Exception] = []

            def ask() -> None:
                try:
                    client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=400)
                except openai.APIError as error:
                    errors.append(error)

            asking = threading.Thread(target=ask)
            asking.start()
            while not len(server.manager.registry):
                time.sleep(0.005)
            monkeypatch.setattr(server.manager.engine, "step", lambda: (_ for _ in ()).throw(MemoryError("all gone")))
        asking.join(20)
        assert not asking.is_alive() and errors[0].status_code == 500 and "all gone" in str(errors[0])
        status, why = health(server.url)
        assert status == 503 and "all gone" in why
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO)
        assert caught.value.status_code == 503
        assert samples(server.url)['hf_cb:up{model_name="tiny"}'] == 0


def test_metrics() -> None:
    with served() as server:
        server.client().chat.completions.create(model="tiny", messages=HELLO, max_tokens=7)
        found = samples(server.url)
        assert found['hf_cb:generation_tokens_total{model_name="tiny"}'] == 7
        assert found['hf_cb:num_requests_running{model_name="tiny"}'] == 0
        assert found['hf_cb:http_requests_total{path="/v1/chat/completions",status="200"}'] == 1
        assert found['hf_cb:http_requests_inside{model_name="tiny"}'] == 0 and len(found) > 7


def test_what_runs_at_the_end_is_cut_short_when_time_is_up() -> None:
    with served(shutdown_timeout=0.1) as server:
        create = server.client().chat.completions.create
        stream = iter(create(model="tiny", messages=HELLO, max_tokens=400, stream=True))
        next(stream)
        with server.manager.pause():  # so that it cannot finish
            draining = asyncio.run_coroutine_threadsafe(drain(server.service, asyncio.Queue()), server.loop)
            draining.result(20)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
                create(model="tiny", messages=HELLO)
            assert caught.value.status_code == 503
        assert health(server.url) == (503, "The server is shutting down.")
        server.wait_until_idle()


def test_a_port_that_is_taken(capsys) -> None:
    with served() as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(OptionError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(server.service, "127.0.0.1", port, when_ready=print)
        assert main(["serve", "no such model", "--port", str(port)]) == 2  # before anything is loaded
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_request_that_takes_too_long() -> None:
    with served(request_timeout=0.05) as server:
        create = server.client().completions.create
        with pytest.raises(openai.InternalServerError) as caught:
            create(model="tiny", prompt="x", max_tokens=500)
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIError, match="ran out of its time"):
            list(create(model="tiny", prompt="x", max_tokens=500, stream=True))
        server.wait_until_idle()


@pytest.mark.slow
def test_sigterm_lets_streams_finish_and_takes_no_more(tmp_path) -> None:
    """The command itself: model folder, key from the environment, and the end."""
    byte_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    code = "import sys; from hf_cb.cli import main; sys.exit(main(sys.argv[1:]))"
    options = [
        str(tmp_path),
        "--port",
        "0",
        "--device",
        "cpu",
        "--served-model-name",
        "mine",
        "--engine",
        "num_blocks=800",
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_CB_API_KEY": "secret"}
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "serve", *options], stderr=output, env=environment
        )
    try:
        end = time.monotonic() + 90
        while not (found := re.search(r"mine at (http://[0-9.:]+/v1)", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        client = openai.OpenAI(base_url=found[1], api_key="secret", max_retries=0, timeout=60)
        again = openai.OpenAI(base_url=found[1], api_key="secret", max_retries=0, timeout=60)
        again.models.list()  # a connection that is there already
        stream = client.completions.create(
            model="mine", prompt="x", n=16, max_tokens=400, stream=True, stream_options={"include_usage": True}
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            while True:
                again.completions.create(model="mine", prompt="x", max_tokens=1)
        assert list(stream)[-1].usage.completion_tokens == 16 * 400
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text(), log.read_text()
