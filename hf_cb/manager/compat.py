"""transformers' own calls on a manager, with their meaning: results by polling, iteration or callback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hf_cb.core import GenerationOutput, Request
from hf_cb.errors import ManagerStoppedError
from hf_cb.manager.router import Router
from hf_cb.text.prompts import encode_prompt

if TYPE_CHECKING:
    from hf_cb.manager.handle import Handle
    from hf_cb.manager.loop import EngineLoop
    from hf_cb.models.generation import Recipe

logger = logging.getLogger("hf_cb")


class TransformersCalls:
    """Mixed into the manager, which has the rest."""

    router: Router
    loop: EngineLoop
    tokenizer: Any

    if TYPE_CHECKING:

        def recipe(self, generation_config: Any, options: dict[str, Any], tokenizer: Any = None) -> Recipe: ...

        def _make_requests(
            self, prompt_ids: list[int], recipe: Recipe, request_id: str | None, priority: int, deadline: float | None
        ) -> list[Request]: ...

        def _enqueue(self, requests: list[Request], handle: Handle | None, streaming: bool = False) -> None: ...

        def _cancel(self, request_ids: list[str]) -> None: ...

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
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        options = {k: v for k, v in given.items() if v is not None} | generation_kwargs
        recipe = self.recipe(None, options)
        requests = self._make_requests(encode_prompt(input_ids, self.tokenizer), recipe, request_id, 0, None)
        try:
            self._enqueue(requests, None, streaming)
        except ManagerStoppedError as refusal:
            logger.warning("Request dropped: %s", refusal)
            return None
        return requests[0].request_id

    def add_requests(
        self,
        inputs: list[Any],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **generation_kwargs: Any,
    ) -> list[str | None]:
        """`add_request` for each of the inputs."""
        return [
            self.add_request(ids, None, max_new_tokens, streaming, record_timestamps, **generation_kwargs)
            for ids in inputs
        ]

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The oldest output of `add_request`'s requests (of that one); None after `timeout` seconds."""
        return self.router.queue.get(request_id, timeout)

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
        self.loop.post(lambda: self._cancel([request_id]))
