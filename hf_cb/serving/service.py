"""What stands between HTTP and a manager: prompts to ids, submission, results, and the health of it all."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from hf_cb.core import Delta
from hf_cb.errors import describe
from hf_cb.serving.answers import Answer
from hf_cb.serving.chat import ChatAnswer
from hf_cb.serving.completions import CompletionAnswer
from hf_cb.serving.errors import ApiError, bad, shutting_down
from hf_cb.serving.limits import Gate, ServerConfig
from hf_cb.serving.logprobs import TokenTexts
from hf_cb.serving.messages import ChatTemplate
from hf_cb.serving.options import submit_options
from hf_cb.serving.protocol import GenerationRequest, read_chat, read_completion
from hf_cb.text.detokenizer import decode
from hf_cb.text.prompts import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_cb.manager.handle import Handle
    from hf_cb.manager.manager import ContinuousBatchingManager

logger = logging.getLogger("hf_cb.server")
T = TypeVar("T")
WORKERS = 2  # threads for templates, tokenizing and whole answers: off the event loop, and few, for the GIL's sake


class Service:
    """Answers requests with a running manager.

    Args:
        tokenizer: for prompts and answers. Prompts get a copy: a tokenizer has a lock, and a long prompt must not
            hold up the text of those who stream.
    """

    def __init__(
        self, manager: ContinuousBatchingManager, tokenizer: PreTrainedTokenizerBase, config: ServerConfig
    ) -> None:
        self.manager, self.config = manager, config
        self.template = ChatTemplate(tokenizer)
        self.gate = Gate(config.max_requests)
        self.draining = False
        self.aborting = asyncio.Event()  # set: what still runs is to end now
        self._encoder, self._decoder = copy.deepcopy(tokenizer), tokenizer
        self._texts = TokenTexts(tokenizer)
        self._workers = ThreadPoolExecutor(WORKERS, "hf_cb-server")

    @property
    def max_model_len(self) -> int:
        return int(self.manager.engine.config.max_model_len)

    async def in_worker(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, call, *args)

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

    # ---------------------------------------------------------------------------------------------------- requests

    def read(self, body: dict[str, Any], is_chat: bool) -> GenerationRequest:
        """ApiError 400 or 404 says what is wrong with it."""
        name = body.get("model")
        if isinstance(name, str) and name != self.config.name:
            message = f"The model {name!r} is not served here: {self.config.name!r} is."
            raise ApiError(404, message, "model", "model_not_found")
        request = read_chat(body, self.template) if is_chat else read_completion(body)
        limit = self.config.max_output_tokens
        if limit is not None and request.max_tokens is not None and request.max_tokens > limit:
            raise bad("max_tokens", f"can be at most {limit} on this server, not {request.max_tokens}.")
        policy = self.manager.config.policy
        if request.fields.get("priority") and isinstance(policy, str) and policy != "priority":
            raise bad("priority", f'needs a server with the policy "priority", and this one has {policy!r}.')
        return request

    def submit(self, request: GenerationRequest, request_id: str) -> Submission:
        """Encodes and submits all prompts of a request; in a worker.

        Raises:
            ApiError, QueueFullError, ManagerStoppedError: nothing of it runs.
        """
        limit = self.manager.config.max_queue_size
        if limit and len(request.prompts) * request.n > limit:
            raise bad("prompt", f"and n ask for {len(request.prompts) * request.n} answers, and {limit} may wait.")
        options = submit_options(request, self.manager.model.generation_config)
        options |= {"deadline": self.config.request_timeout, "queue_wait": 0.0, "tokenizer": self._decoder}
        if self.config.max_output_tokens is not None:
            options.setdefault("max_new_tokens", self.config.max_output_tokens)
        try:
            prompts = [self._encode(request, i) for i in range(len(request.prompts))]
            handles = [
                self.manager.submit(ids, request_id=f"{request_id}-{i}", index=i, **options)
                for i, ids in enumerate(prompts)
            ]
        except (TypeError, ValueError) as error:  # about this request, as `submit` says
            raise ApiError(400, str(error)) from error
        return Submission(handles, self._answer(request, prompts))

    def _encode(self, request: GenerationRequest, number: int) -> list[int]:
        """One prompt's ids, no more than the model takes with what is to come."""
        prompt, name = request.prompts[number], "messages" if request.is_chat else "prompt"
        if request.is_chat and not self.template.exists:
            raise bad("messages", "need a chat template, and this model's tokenizer has none: use /v1/completions.")
        if isinstance(prompt, str) and not request.fields.get("add_special_tokens", True):
            prompt = self._encoder(prompt, add_special_tokens=False)["input_ids"]
        ids = encode_prompt(prompt, self._encoder, chat_template_kwargs=request.template_kwargs)
        keep = request.fields.get("truncate_prompt_tokens")
        if keep is not None:
            keep = self.max_model_len - (request.max_tokens or 1) + 1 if keep == -1 else keep
            ids = ids[-max(1, keep) :]
        room = self.max_model_len - len(ids) + 1  # the last token is never fed back
        if (request.max_tokens or 1) > room:
            asked = "" if request.max_tokens is None else f" and {request.max_tokens} are asked for"
            message = f"is too long: {len(ids)} tokens{asked}, and the model takes {self.max_model_len} together."
            raise bad(name, message, "context_length_exceeded")
        return ids

    def _answer(self, request: GenerationRequest, prompts: Sequence[list[int]]) -> Answer:
        from hf_cb import __version__

        head = {"model": self.config.name, "system_fingerprint": f"hf_cb-{__version__}"}
        if request.is_chat:
            return ChatAnswer(request, head, self._texts)
        texts: list[str] = []
        if request.echo:
            given = zip(request.prompts, prompts, strict=True)
            texts = [prompt if isinstance(prompt, str) else decode(self._decoder, ids) for prompt, ids in given]
        return CompletionAnswer(request, head, self._texts, texts)


class Submission:
    """The handles of one HTTP request, one for each prompt, and the form of their answer."""

    def __init__(self, handles: list[Handle], answer: Answer) -> None:
        self.handles, self.answer = handles, answer
        streams = [stream for handle in handles for stream in handle.mailbox.streams]
        self._numbers = {stream.request_id: i for i, stream in enumerate(streams)}

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()

    async def finished(self) -> None:
        """Returns when all have ended; raises the first one's error."""
        for handle in self.handles:
            await handle

    def whole(self) -> dict[str, Any]:
        """The answer, once all have ended; in a worker."""
        return self.answer.whole([output for handle in self.handles for output in handle.outputs(0)])

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The answer piece by piece; raises a sequence's error."""
        async with aclosing(_merged(self.handles)) as deltas:
            async for delta in deltas:
                for chunk in self.answer.chunks(self._numbers[delta.request_id], delta):
                    yield chunk
        last = self.answer.last_chunk([handle.metrics for handle in self.handles])
        if last is not None:
            yield last

    def summary(self) -> str:
        """For the log: tokens in and out, and seconds."""
        metrics = [handle.metrics for handle in self.handles]
        out = sum(len(s.token_ids) for handle in self.handles for s in handle.mailbox.streams)
        return (
            f"prompt_tokens={sum(m.prompt_tokens for m in metrics)} completion_tokens={out} "
            f"queue_s={metrics[0].queue_s:.3f} ttft_s={metrics[0].ttft_s:.3f}"
        )


async def _merged(handles: Sequence[Handle]) -> AsyncGenerator[Delta]:
    """The deltas of several handles as they come."""
    if len(handles) == 1:
        async for delta in handles[0]:
            yield delta
        return
    news: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(len(handles))

    async def read(handle: Handle) -> None:
        try:
            async for delta in handle:
                await news.put(delta)
            await news.put(None)
        except Exception as error:
            await news.put(error)

    readers = [asyncio.ensure_future(read(handle)) for handle in handles]
    try:
        left = len(handles)
        while left:
            item = await news.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
