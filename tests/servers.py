"""A server on a tiny model, in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from byte_models import byte_model, byte_tokenizer
from transformers import PreTrainedModel

from hf_cb import ContinuousBatchingManager, EngineConfig
from hf_cb.serving.limits import ServerConfig
from hf_cb.serving.server import listen, make_server
from hf_cb.serving.service import Service

openai = pytest.importorskip("openai", reason="openai is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")


@dataclass
class Served:
    url: str
    manager: ContinuousBatchingManager
    service: Service
    tokenizer: Any
    loop: asyncio.AbstractEventLoop

    def client(self, key: str = "none", retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=retries, timeout=30)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def wait_until_idle(self) -> None:
        """No request is left, and all blocks are free or cached."""
        end = time.monotonic() + 20
        while (len(self.manager.registry) or self.service.gate.inside) and time.monotonic() < end:
            time.sleep(0.01)
        stats = self.manager.stats()
        assert (stats.running, stats.waiting, stats.blocks_held, self.service.gate.inside) == (0, 0, 0, 0), stats


@contextmanager
def served(
    model: PreTrainedModel | None = None, engine: dict[str, Any] | None = None, **options: Any
) -> Iterator[Served]:
    """`engine`: of its EngineConfig; `options`: of its ServerConfig."""
    tokenizer = byte_tokenizer()
    config = EngineConfig(**({"block_size": 8, "num_blocks": 600} | (engine or {})))
    manager = ContinuousBatchingManager(model or byte_model(), None, config, tokenizer)
    manager.start()
    service = Service(manager, tokenizer, ServerConfig(name="tiny", **options))
    server, loop = make_server(service, lambda: None), asyncio.new_event_loop()
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(sockets=[listener]),))
    thread.start()
    try:
        end = time.monotonic() + 20
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", manager, service, tokenizer, loop)
    finally:
        server.should_exit = True
        thread.join(20)
        loop.close()
        listener.close()
        service.close()
        fatal = manager.loop.fatal_error
        manager.stop(hard_stop=True)
        if fatal is None:
            manager.engine.check_idle()
