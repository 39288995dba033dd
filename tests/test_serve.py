"""`transformers serve --continuous-batching`, unmodified, on our manager, with the official client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_models import VOCAB, generate_alone, greedy, make_model, make_tokenizer

openai = pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model, tokenizer = make_model(max_position_embeddings=512), make_tokenizer()
    model.generation_config.eos_token_id = None
    model.generation_config.do_sample = False
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["serve", "--continuous-batching", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    command = [sys.executable, "-P", "-c", "import sys; from hf_cb.cli import main; sys.exit(main(sys.argv[1:]))"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "transformers", *arguments, "--dtype", "float32"], stdout=output, stderr=output, env=environment
        )
    try:
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.2)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    finally:
        server.terminate()
        assert server.wait(20) is not None
        print(log.read_text()[-3000:])


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_many_clients_streaming_and_not(client: openai.OpenAI, folder: Path) -> None:
    model, tokenizer = make_model(max_position_embeddings=512), make_tokenizer()
    texts = ["the answer", "and the END", "is it the answer and the END", "abc"]
    want = []
    for text in texts:
        ids = tokenizer.apply_chat_template(chat(text), add_generation_prompt=True, return_dict=False)
        assert max(ids) < VOCAB
        out = generate_alone(model, ids, greedy(NEW_TOKENS))
        want.append(tokenizer.decode(out, skip_special_tokens=True))

    def whole(text: str) -> str:
        answer = client.chat.completions.create(model=str(folder), messages=chat(text), max_tokens=NEW_TOKENS)
        return answer.choices[0].message.content

    def streamed(text: str) -> str:
        stream = client.chat.completions.create(
            model=str(folder), messages=chat(text), max_tokens=NEW_TOKENS, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    whole(texts[0])  # loads the model and fixes the sampling
    with ThreadPoolExecutor(8) as pool:
        both = [pool.submit(ask, text) for ask in (whole, streamed) for text in texts]
        answers = [future.result(60) for future in both]
    # transformers' streamer keeps a character back that is not complete, also the last one
    assert [a.rstrip("\N{REPLACEMENT CHARACTER}") for a in answers] == [
        w.rstrip("\N{REPLACEMENT CHARACTER}") for w in want + want
    ]


def test_a_client_that_goes_away(client: openai.OpenAI, folder: Path) -> None:
    stream = client.chat.completions.create(model=str(folder), messages=chat("the"), max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    again = client.chat.completions.create(model=str(folder), messages=chat("the"), max_tokens=4)
    assert again.choices[0].finish_reason == "length"


def test_torch_is_not_loaded_for_help() -> None:
    code = "from hf_cb.cli import main; import sys; main(['transformers', '--help']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-P", "-c", code], capture_output=True).returncode == 0
