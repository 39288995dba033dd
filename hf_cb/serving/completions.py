"""Answers in the shape of OpenAI's completion API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_cb.core import Delta, GenerationOutput, RequestMetrics
from hf_cb.serving.answers import finish_reason, new_id, now, usage
from hf_cb.serving.logprobs import TokenTexts, completion_logprobs, known, prompt_logprobs
from hf_cb.serving.protocol import GenerationRequest


class CompletionAnswer:
    """An `Answer` with `n` choices for each prompt, in the order of the prompts.

    Args:
        prompt_texts: what `echo` repeats, one for each prompt; empty without it.
    """

    def __init__(
        self, request: GenerationRequest, head: dict[str, Any], texts: TokenTexts, prompt_texts: Sequence[str]
    ) -> None:
        self.request = request
        self.texts = texts
        self.prompt_texts = prompt_texts
        self.head = {"id": new_id("cmpl"), "object": "text_completion", "created": now()} | head
        count = request.n * len(request.prompts)
        self._offsets = [0] * count
        self._opened = [False] * count
        self._tokens = 0

    # ------------------------------------------------------------------------------------------------------- whole

    def whole(self, outputs: Sequence[GenerationOutput]) -> dict[str, Any]:
        tokens = sum(len(o.generated_tokens) for o in outputs)
        choices = [self._choice(i, output) for i, output in enumerate(outputs)]
        return self.head | {"choices": choices, "usage": usage([o.metrics for o in outputs[:: self.request.n]], tokens)}

    def _choice(self, number: int, output: GenerationOutput) -> dict[str, Any]:
        before = self.prompt_texts[number // self.request.n] if self.request.echo else ""
        choice: dict[str, Any] = {"index": number, "text": before + (output.text or ""), "logprobs": None}
        choice |= {"finish_reason": finish_reason(output.finish_reason), "stop_reason": output.stop_reason}
        ids = output.generated_tokens
        if (k := self.request.top_logprobs) is not None:
            own = completion_logprobs(
                self.texts, ids, output.logprobs or [], known(output.top_logprobs, len(ids)), k, len(before)
            )
            choice["logprobs"] = _joined(self._of_prompt(output, k), own) if self.request.echo else own
        if "prompt_logprobs" in self.request.fields:
            choice["prompt_logprobs"] = prompt_logprobs(self.texts, output.prompt_logprobs or [])
        return choice

    def _of_prompt(self, output: GenerationOutput, k: int) -> dict[str, Any]:
        ids, tops = output.prompt_ids, output.prompt_logprobs or []
        values = [None if top is None else top[i] for i, top in zip(ids, tops, strict=True)]
        return completion_logprobs(self.texts, ids, values, tops, k)

    # ------------------------------------------------------------------------------------------------------ stream

    def chunks(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        self._tokens += len(delta.token_ids)
        reason = finish_reason(delta.finish_reason)
        text = delta.text
        if self.request.echo and not self._opened[number]:
            text = self.prompt_texts[number // self.request.n] + text
        offset, self._offsets[number] = self._offsets[number], self._offsets[number] + len(text)
        self._opened[number] = True
        k = self.request.top_logprobs
        if not text and reason is None and (k is None or not delta.token_ids):
            return []
        choice: dict[str, Any] = {"index": number, "text": text, "logprobs": None, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if k is not None and delta.token_ids:
            ids = delta.token_ids
            tops = known(delta.top_logprobs, len(ids))
            choice["logprobs"] = completion_logprobs(self.texts, ids, delta.logprobs or [], tops, k, offset)
        chunk = self.head | {"choices": [choice]}
        return [chunk | {"usage": None} if self.request.include_usage else chunk]

    def last_chunk(self, metrics: Sequence[RequestMetrics]) -> dict[str, Any] | None:
        if not self.request.include_usage:
            return None
        return self.head | {"choices": [], "usage": usage(metrics, self._tokens)}


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}
