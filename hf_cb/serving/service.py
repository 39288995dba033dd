"""What all requests of a server share: the way in, threads for what would hold up others, and its health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from hf_cb.errors import describe
from hf_cb.serving.errors import ApiError, shutting_down
from hf_cb.serving.intake import Intake
from hf_cb.serving.limits import Gate, ServerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_cb.manager.manager import ContinuousBatchingManager

T = TypeVar("T")
WORKERS = 2  # threads for templates, tokenizing and whole answers: off the event loop, and few, for the GIL's sake


class Service:
    """One server's state: what it takes in, and whether it can."""

    def __init__(
        self, manager: ContinuousBatchingManager, tokenizer: PreTrainedTokenizerBase, config: ServerConfig
    ) -> None:
        self.manager, self.config = manager, config
        self.intake = Intake(manager, tokenizer, config.name, config.max_output_tokens, config.request_timeout)
        self.gate = Gate(config.max_requests)
        self.draining = False
        self.aborting = asyncio.Event()  # set: what still runs is to end now
        self._workers = ThreadPoolExecutor(WORKERS, "hf_cb-server")

    async def in_worker(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.wrap_future(self.begin_in_worker(call, *args))

    def begin_in_worker(self, call: Callable[..., T], *args: Any) -> Future[T]:
        return self._workers.submit(call, *args)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------ health

    def problem(self) -> str | None:
        """Why no request can be answered, or None."""
        fatal = self.manager.loop.fatal_error
        if fatal is not None:
            return f"The generation thread has died: {describe(fatal)}"
        if not self.manager.is_running():
            return "The generation thread is not running."
        return "The server is shutting down." if self.draining else None

    def refuse_if_unavailable(self) -> None:
        """Raises ApiError 503 where `problem` has one."""
        if self.draining:
            raise shutting_down()
        if (problem := self.problem()) is not None:
            raise ApiError(503, problem, code="unavailable")

    def seconds_to_wait(self) -> int:
        return self.gate.seconds_to_wait(self.manager.stats().waiting)
