"""Answers in the shape of OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_cb.core import Delta, GenerationOutput, RequestMetrics
from hf_cb.serving.answers import finish_reason, new_id, now, usage
from hf_cb.serving.logprobs import TokenTexts, chat_logprobs, known, prompt_logprobs
from hf_cb.serving.protocol import GenerationRequest
from hf_cb.serving.tools import ToolCall, ToolCallReader


class ChatAnswer:
    """An `Answer` with one message, or one stream of chunks, for each sequence."""

    def __init__(self, request: GenerationRequest, head: dict[str, Any], texts: TokenTexts) -> None:
        self.request = request
        self.texts = texts
        self.head = {"id": new_id("chatcmpl"), "created": now()} | head
        self._readers = [self._reader() for _ in range(request.n)]
        self._opened = [False] * request.n
        self._calls = [0] * request.n
        self._tokens = 0

    def _reader(self) -> ToolCallReader | None:
        if not self.request.has_tools:
            return None
        return ToolCallReader(at_most_one=not self.request.fields.get("parallel_tool_calls", True))

    # ------------------------------------------------------------------------------------------------------- whole

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        tokens = sum(len(o.generated_tokens) for o in outputs)
        answer = {"object": "chat.completion"} | self.head
        answer["choices"] = [self._choice(i, output) for i, output in enumerate(outputs)]
        answer["usage"] = usage([outputs[0].metrics], tokens)
        if "prompt_logprobs" in self.request.fields:
            answer["prompt_logprobs"] = prompt_logprobs(self.texts, outputs[0].prompt_logprobs or [])
        return answer

    def _choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        reason = finish_reason(output.finish_reason)
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        reader = self._reader()
        if reader is not None:
            found = [*reader.push(output.text or ""), *reader.finish()]
            items = [item for item in found if isinstance(item, ToolCall)]
            calls = [item.as_json(f"{self.head['id']} {index}", i) for i, item in enumerate(items)]
            if calls:
                message["content"] = "".join(item for item in found if isinstance(item, str)) or None
                message["tool_calls"] = calls
                reason = "tool_calls" if reason == "stop" else reason
        choice = {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
        choice["stop_reason"] = output.stop_reason
        if (k := self.request.top_logprobs) is not None:
            ids = output.generated_tokens
            tops = known(output.top_logprobs, len(ids))
            choice["logprobs"] = chat_logprobs(self.texts, ids, output.logprobs or [], tops, k)
        return choice

    # ------------------------------------------------------------------------------------------------------ stream

    def chunks(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        self._tokens += len(delta.token_ids)
        reason = finish_reason(delta.finish_reason)
        reader = self._readers[number]
        found: list[str | ToolCall] = [delta.text] if delta.text else []
        if reader is not None:
            found = reader.push(delta.text) + (reader.finish() if reason else [])
            reason = "tool_calls" if reason == "stop" and reader.num_calls else reason
        parts = [self._part(item, number) for item in found]
        logprobs = self._logprobs(delta)
        if logprobs is not None or reason is not None:
            parts = parts or [{}]
        chunks = []
        if not self._opened[number]:
            self._opened[number] = True
            chunks.append(self._chunk(number, {"role": "assistant", "content": ""}))
        chunks += [self._chunk(number, part) for part in parts]
        if parts:
            chunks[-1]["choices"][0] |= {"logprobs": logprobs, "finish_reason": reason}
            if reason is not None:
                chunks[-1]["choices"][0]["stop_reason"] = delta.stop_reason
        return chunks

    def _part(self, item: str | ToolCall, number: int) -> dict[str, Any]:
        if isinstance(item, str):
            return {"content": item}
        place, self._calls[number] = self._calls[number], self._calls[number] + 1
        return {"tool_calls": [{"index": place} | item.as_json(f"{self.head['id']} {number}", place)]}

    def _chunk(self, number: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {"object": "chat.completion.chunk"} | self.head | {"choices": [choice]}
        return chunk | {"usage": None} if self.request.include_usage else chunk

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        k = self.request.top_logprobs
        if k is None or not delta.token_ids:
            return None
        tops = known(delta.top_logprobs, len(delta.token_ids))
        return chat_logprobs(self.texts, delta.token_ids, delta.logprobs or [], tops, k)

    def last_chunk(self, metrics: Sequence[RequestMetrics]) -> dict[str, Any] | None:
        if not self.request.include_usage:
            return None
        chunk = {"object": "chat.completion.chunk"} | self.head
        return chunk | {"choices": [], "usage": usage(metrics, self._tokens)}
