"""OpenAI's chat and completion requests, field by field: what is honoured, and what is refused by its name.

Beside OpenAI's fields there are those that vLLM's server has added and that clients know (`top_k`, `min_p`,
`repetition_penalty`, ...), with vLLM's meaning. Nothing is ignored: a field that is in no table is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_cb.serving.errors import bad
from hf_cb.serving.fields import (
    Check,
    biases,
    checked,
    flag,
    mapping,
    number,
    one_of,
    refused,
    required,
    text,
    texts,
    token_ids,
    whole,
)
from hf_cb.serving.messages import ChatTemplate, read_messages, read_tools

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
COMPLETION_TOKENS = 16  # OpenAI's default for completions


def _stream_options(name: str, value: Any) -> dict[str, Any]:
    known: dict[str, Check] = {
        "include_usage": flag,
        "include_obfuscation": one_of(False, reason="chunks are not padded against observers of their sizes"),
    }
    return checked(mapping(name, value), known, name)


def _truncation(name: str, value: Any) -> int:
    if value == 0:
        raise bad(name, "must be at least 1, or -1 for what the model takes, not 0.")
    return int(whole(-1)(name, value))


def _no_metadata(name: str, value: Any) -> dict[str, Any]:
    if mapping(name, value):
        raise bad(name, "is not supported: nothing is stored.", "unsupported_parameter")
    return {}


_SHARED: dict[str, Check] = {
    "model": text,
    "n": whole(1, MAX_CHOICES),
    "max_tokens": whole(0),
    "temperature": number(0),
    "top_p": number(0, 1, above=True),
    "seed": whole(),
    "stop": texts,
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": biases,
    "stream": flag,
    "stream_options": _stream_options,
    "user": text,
    "metadata": _no_metadata,
    "store": one_of(False, reason="nothing is stored"),
    "service_tier": one_of("auto", "default"),
    # vLLM's
    "top_k": whole(-1),
    "min_p": number(0, 1),
    "repetition_penalty": number(0, above=True),
    "min_tokens": whole(0),
    "ignore_eos": flag,
    "stop_token_ids": token_ids,
    "include_stop_str_in_output": flag,
    "skip_special_tokens": flag,
    "truncate_prompt_tokens": _truncation,
    "prompt_logprobs": whole(0, MAX_TOP_LOGPROBS),
    "priority": whole(),
    "use_beam_search": one_of(False, reason="continuous batching has no beams"),
}

_LATER = "structured output and forced tools come later"

CHAT: dict[str, Check] = _SHARED | {
    "messages": lambda name, value: value,  # by `read_messages`, which knows the template
    "max_completion_tokens": whole(0),
    "logprobs": flag,
    "top_logprobs": whole(0, MAX_TOP_LOGPROBS),
    "tools": lambda name, value: value,
    "tool_choice": one_of("none", "auto", reason=_LATER),
    "parallel_tool_calls": flag,
    "response_format": lambda name, value: _text_only(name, value),
    "modalities": one_of(["text"], reason="hf_cb answers in text"),
    "reasoning_effort": text,
    "verbosity": text,
    "safety_identifier": text,
    "prompt_cache_key": text,  # one server has one prefix cache: whoever has the same key meets the same
    "add_generation_prompt": flag,
    "continue_final_message": flag,
    "chat_template_kwargs": mapping,
    "audio": refused("hf_cb answers in text"),
    "prediction": refused("there is no decoding with predicted outputs"),
    "moderation": refused("there is no moderation"),
    "prompt_cache_options": refused("the prefix cache has no options by request"),
    "prompt_cache_retention": one_of("in_memory"),
    "web_search_options": refused("there is no web search"),
    "functions": refused("it is deprecated, use tools"),
    "function_call": refused("it is deprecated, use tool_choice"),
}

COMPLETION: dict[str, Check] = _SHARED | {
    "prompt": lambda name, value: read_prompts(name, value),
    "logprobs": whole(0, MAX_TOP_LOGPROBS),
    "echo": flag,
    "add_special_tokens": flag,
    "best_of": whole(1),
    "suffix": refused("there is no insertion of text"),
}


@dataclass(frozen=True)
class GenerationRequest:
    """A request that has been read. `fields` has what was given, checked, under OpenAI's names.

    `prompts`: texts or lists of token ids, or one chat, whose template gets `template_kwargs`.
    """

    fields: dict[str, Any]
    prompts: list[Any]
    is_chat: bool
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    has_tools: bool = False

    @property
    def n(self) -> int:
        return int(self.fields.get("n", 1))

    @property
    def stream(self) -> bool:
        return bool(self.fields.get("stream", False))

    @property
    def include_usage(self) -> bool:
        return bool(self.fields.get("stream_options", {}).get("include_usage", False))

    @property
    def echo(self) -> bool:
        return bool(self.fields.get("echo", False))

    @property
    def top_logprobs(self) -> int | None:
        """How many alternatives to each token are wanted; None: no log-probabilities at all."""
        if not self.is_chat:
            return self.fields.get("logprobs")
        return int(self.fields.get("top_logprobs", 0)) if self.fields.get("logprobs") else None

    @property
    def user(self) -> str | None:
        return self.fields.get("user", self.fields.get("safety_identifier"))


def read_chat(body: Mapping[str, Any], template: ChatTemplate) -> GenerationRequest:
    """A request to `/v1/chat/completions`; ApiError 400 names what is wrong with it."""
    fields = checked(body, CHAT)
    required(fields, ["messages"])
    _check_together(fields)
    if "top_logprobs" in fields and not fields.get("logprobs"):
        raise bad("top_logprobs", "needs logprobs=true.")
    limit = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if limit == 0:
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        raise bad(name, "must be at least 1, not 0.")
    _check_minimum(fields, limit)
    if "max_tokens" in fields and fields["max_tokens"] != limit:
        raise bad("max_tokens", "and max_completion_tokens are two names for one thing: give one.")
    messages = read_messages(fields["messages"], template)
    tools = read_tools(fields["tools"], template) if fields.get("tools") else None
    if tools is None and "tool_choice" in fields and fields["tool_choice"] != "none":
        raise bad("tool_choice", "needs tools.")
    offered = tools if fields.get("tool_choice") != "none" else None
    kwargs = template.kwargs(fields)
    if offered is not None:
        kwargs["tools"] = offered
    return GenerationRequest(fields, [messages], True, kwargs, limit, offered is not None)


def read_completion(body: Mapping[str, Any]) -> GenerationRequest:
    """A request to `/v1/completions`; ApiError 400 names what is wrong with it."""
    fields = checked(body, COMPLETION)
    required(fields, ["prompt"])
    _check_together(fields)
    if fields.get("best_of", fields.get("n", 1)) != fields.get("n", 1):
        raise bad("best_of", "other than n is not supported: ask for n answers with logprobs, and choose.")
    if "add_special_tokens" in fields and any(isinstance(p, list) for p in fields["prompt"]):
        raise bad("add_special_tokens", "is for prompts that are text.")
    if fields.get("echo") and "logprobs" in fields and fields.get("stream"):
        raise bad("echo", "with logprobs cannot be streamed.")
    limit = fields.get("max_tokens", COMPLETION_TOKENS)
    if limit == 0 and not fields.get("echo"):
        raise bad("max_tokens", "must be at least 1, or 0 with echo.")
    _check_minimum(fields, limit)
    return GenerationRequest(fields, fields["prompt"], False, max_tokens=limit)


def read_prompts(name: str, value: Any) -> list[Any]:
    """A text, a list of texts, a list of ids or a list of such lists, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise bad(name, "must be a string, a list of strings, a list of token ids, or a list of such lists.")
    if isinstance(value[0], int):
        return [token_ids(name, value)]
    if [] in value:
        raise bad(name, "must not have an empty list of token ids.")
    kind = text if isinstance(value[0], str) else token_ids
    return [kind(f"{name}[{i}]", v) for i, v in enumerate(value)]


def _check_together(fields: Mapping[str, Any]) -> None:
    if "stream_options" in fields and not fields.get("stream"):
        raise bad("stream_options", "needs stream=true.")
    if "prompt_logprobs" in fields and fields.get("stream"):
        raise bad("prompt_logprobs", "cannot be streamed.")


def _check_minimum(fields: Mapping[str, Any], limit: int | None) -> None:
    least = fields.get("min_tokens", 0)
    if limit is not None and least > limit:
        raise bad("min_tokens", f"is {least}, and at most {limit} tokens are asked for: raise max_tokens with it.")


def _text_only(name: str, value: Any) -> Any:
    kind = mapping(name, value).get("type")
    one_of("text", reason=_LATER)(f"{name}.type", kind)
    return checked(value, {"type": text}, name)
