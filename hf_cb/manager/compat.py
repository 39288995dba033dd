"""transformers' own calls on a manager, with their meaning: results by polling, iteration or callback."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hf_cb.config import EngineConfig
from hf_cb.core import GenerationOutput, Request
from hf_cb.errors import ManagerStoppedError
from hf_cb.kernels.device import on
from hf_cb.manager.mailbox import make_output
from hf_cb.manager.router import Router
from hf_cb.text.prompts import encode_prompt

if TYPE_CHECKING:
    from hf_cb.manager.loop import EngineLoop
    from hf_cb.manager.mailbox import Mailbox
    from hf_cb.manager.registry import Registry
    from hf_cb.options.recipe import Recipe

logger = logging.getLogger("hf_cb")


class TransformersCalls:
    """Mixed into the manager, which has the rest."""

    is_tp_driver = True  # as transformers says it; `following_manager.FollowingManager` is for the other ranks
    router: Router
    loop: EngineLoop
    tokenizer: Any
    registry: Registry
    config: EngineConfig

    if TYPE_CHECKING:

        def recipe(self, generation_config: Any, options: dict[str, Any], tokenizer: Any = None) -> Recipe: ...

        def _make_requests(
            self, prompt_ids: list[int], recipe: Recipe, request_id: str | None = None
        ) -> list[Request]: ...

        def _enqueue(
            self, requests: list[Request], mailbox: Mailbox | None, streaming: bool = False, *, queue_wait: float = 0.0
        ) -> None: ...

        def _post_cancel(self, requests: list[Request]) -> None: ...

    def add_request(
        self,
        input_ids: Any,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **generation_kwargs: Any,
    ) -> str | None:
        """As in transformers: the request's id, or None if the manager takes no more. Results come by `get_result`,
        iteration, or a registered handler. Any `GenerationConfig` option may be given."""
        try:
            requests = self._checked(input_ids, request_id, max_new_tokens, eos_token_id, generation_kwargs)
            return self._added(requests, streaming)
        except Exception:
            if request_id is not None:
                self.router.unregister(request_id)
            raise

    def add_requests(
        self,
        inputs: list[Any],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **generation_kwargs: Any,
    ) -> list[str | None]:
        """`add_request` for each of the inputs; a bad one raises before any is added."""
        checked = [self._checked(ids, None, max_new_tokens, None, generation_kwargs) for ids in inputs]
        return [self._added(requests, streaming) for requests in checked]

    def _checked(
        self,
        input_ids: Any,
        request_id: str | None,
        max_new_tokens: int | None,
        eos_token_id: int | list[int] | None,
        options: dict[str, Any],
    ) -> list[Request]:
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        recipe = self.recipe(None, {k: v for k, v in given.items() if v is not None} | options)
        return self._make_requests(encode_prompt(input_ids, self.tokenizer), recipe, request_id)

    def _added(self, requests: list[Request], streaming: bool) -> str | None:
        try:
            self._enqueue(requests, None, streaming, queue_wait=self.config.queue_wait)
        except ManagerStoppedError as refusal:
            logger.warning("Request dropped: %s", refusal)
            self.router.refuse(make_output(requests[0], refusal))  # whoever has registered for it is told
            return None
        return requests[0].request_id

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The oldest output of `add_request`'s requests (of that one); None after `timeout` seconds, or at once where
        none can come."""
        return self.router.queue.get(request_id, timeout if self.loop.is_running else 0)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs of `add_request`'s requests until the manager has stopped."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """One request's outputs, up to its last."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Outputs of that request go to `callback` on the running event loop."""
        self.router.register(request_id, callback)

    def cancel_request(self, request_id: str) -> None:
        """Ends a request within a step; nothing happens if it is not alive."""
        request = self.registry.get(request_id)
        if request is not None:
            self._post_cancel([request])

    @property
    def background_thread_status(self) -> EngineLoop:
        """Has `fatal_error`: the exception that killed the thread, or None."""
        return self.loop

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Waits for the thread to end, at most `timeout` seconds."""
        self.loop.join(timeout)

    def warmup(self) -> None:
        """On a GPU, records the decode steps that the first requests would wait for; elsewhere nothing takes long at
        first. Returns when it is done, or before the start at once: then it is done at the start."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()

        def warm_up() -> None:
            runner = self.loop.engine.runner
            with on(runner.device):
                runner.warm_up()
            done.put(None)

        self.loop.post(warm_up)
        if self.loop.is_running:
            self.loop.check_may_wait()
        while self.loop.is_running:
            with suppress(queue.Empty):
                return done.get(timeout=0.1)
