"""From a request to the handles of what runs for it, and to its answer; over HTTP or from a file of requests."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any

from hf_cb.core import Delta
from hf_cb.serving.answers import Answer
from hf_cb.serving.chat import ChatAnswer
from hf_cb.serving.completions import CompletionAnswer
from hf_cb.serving.errors import ApiError, bad
from hf_cb.serving.logprobs import TokenTexts
from hf_cb.serving.messages import ChatTemplate
from hf_cb.serving.options import submit_options
from hf_cb.serving.protocol import GenerationRequest, read_chat, read_completion
from hf_cb.text.detokenizer import decode
from hf_cb.text.prompts import encode_prompt
from hf_cb.text.tokenizers import tokenizer_lock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_cb.manager.handle import Handle
    from hf_cb.manager.manager import ContinuousBatchingManager


class Intake:
    """Reads requests and submits them to a manager; used by several threads.

    Args:
        tokenizer: for prompts and answers. Prompts get a copy: a tokenizer has a lock, and a long prompt must not
            hold up the text of those who stream.
        name: the model's, in requests and answers.
        max_output_tokens: most that a request may ask for; None: what the model takes.
        deadline: seconds after which a request ends with "timeout".
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        max_output_tokens: int | None = None,
        deadline: float | None = None,
    ) -> None:
        self.manager, self.name = manager, name
        self.max_output_tokens, self.deadline = max_output_tokens, deadline
        self.template = ChatTemplate(tokenizer)
        self._encoder, self._decoder = copy.deepcopy(tokenizer), tokenizer
        self._texts = TokenTexts(tokenizer)

    @property
    def max_model_len(self) -> int:
        return int(self.manager.engine.config.max_model_len)

    def read(self, body: dict[str, Any], is_chat: bool) -> GenerationRequest:
        """ApiError 400 or 404 says what is wrong with it."""
        name = body.get("model")
        if isinstance(name, str) and name != self.name:
            message = f"The model {name!r} is not served here: {self.name!r} is."
            raise ApiError(404, message, "model", "model_not_found")
        request = read_chat(body, self.template) if is_chat else read_completion(body)
        limit = self.max_output_tokens
        for name, asked in (("max_tokens", request.max_tokens), ("min_tokens", request.fields.get("min_tokens"))):
            if limit is not None and asked is not None and asked > limit:
                raise bad(name, f"can be at most {limit} on this server, not {asked}.")
        policy = self.manager.config.policy
        if request.fields.get("priority") and isinstance(policy, str) and policy != "priority":
            raise bad("priority", f'needs a server with the policy "priority", and this one has {policy!r}.')
        return request

    def submit(
        self,
        request: GenerationRequest,
        request_id: str,
        head: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> Submission:
        """Encodes and submits all prompts of a request.

        Args:
            head: fields of the answer that are not to be made anew, such as "id".
            seed: for a request without one.

        Raises:
            ApiError, QueueFullError, ManagerStoppedError: nothing of it runs.
        """
        limit = self.manager.config.max_queue_size
        if limit and len(request.prompts) * request.n > limit:
            raise bad("prompt", f"and n ask for {len(request.prompts) * request.n} answers, and {limit} may wait.")
        options = submit_options(request, self.manager.model.generation_config)
        options |= {"deadline": self.deadline, "queue_wait": 0.0, "tokenizer": self._decoder}
        if seed is not None:
            options.setdefault("seed", seed)
        if self.max_output_tokens is not None:
            options.setdefault("max_new_tokens", self.max_output_tokens)
        with ExitStack() as undo:
            handles: list[Handle] = []
            try:
                prompts = [self._encode(request, i) for i in range(len(request.prompts))]
                for i, ids in enumerate(prompts):
                    handles.append(self.manager.submit(ids, request_id=f"{request_id}-{i}", index=i, **options))
                    undo.callback(handles[i].cancel)
            except (TypeError, ValueError) as error:  # about this request, as `submit` says
                raise ApiError(400, str(error)) from error
            submission = Submission(request, handles, self._answer(request, prompts, head or {}))
            undo.pop_all()
        return submission

    def _encode(self, request: GenerationRequest, number: int) -> list[int]:
        """One prompt's ids, no more than the model takes with what is to come."""
        prompt, name = request.prompts[number], "messages" if request.is_chat else "prompt"
        if request.is_chat and not self.template.exists:
            raise bad("messages", "need a chat template, and this model's tokenizer has none: use /v1/completions.")
        if isinstance(prompt, str) and not request.fields.get("add_special_tokens", True):
            with tokenizer_lock(self._encoder):
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

    def _answer(self, request: GenerationRequest, prompts: Sequence[list[int]], own: Mapping[str, Any]) -> Answer:
        head = {"model": self.name, "system_fingerprint": f"hf_cb-{sys.modules['hf_cb'].__version__}"} | dict(own)
        if request.is_chat:
            return ChatAnswer(request, head, self._texts)
        texts: list[str] = []
        if request.echo:
            given = zip(request.prompts, prompts, strict=True)
            texts = [prompt if isinstance(prompt, str) else decode(self._decoder, ids) for prompt, ids in given]
        return CompletionAnswer(request, head, self._texts, texts)


class Submission:
    """What runs for a request: handles, one for each prompt, and the form of their answer."""

    def __init__(self, request: GenerationRequest, handles: list[Handle], answer: Answer) -> None:
        self.request, self.handles, self.answer = request, handles, answer
        streams = [stream for handle in handles for stream in handle.mailbox.streams]
        self._numbers = {stream.request_id: i for i, stream in enumerate(streams)}

    def cancel(self) -> None:
        for handle in self.handles:
            if not handle.done:
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
