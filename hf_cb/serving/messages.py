"""The messages and tools of a chat request, checked, in the form that chat templates take."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from hf_cb.serving.errors import bad
from hf_cb.serving.fields import Check, checked, mapping, one_of, refused, required, text

_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """What a tokenizer's chat template can be told. What it does not look at is refused, since it would be ignored."""

    def __init__(self, tokenizer: Any) -> None:
        given = getattr(tokenizer, "chat_template", None) or ""
        self.source = "\n".join(given.values()) if isinstance(given, Mapping) else str(given)
        signature = inspect.signature(tokenizer.apply_chat_template) if tokenizer is not None else None
        self._own = set(signature.parameters if signature else ()) - {"documents", "kwargs"}

    @property
    def exists(self) -> bool:
        return bool(self.source)

    def knows(self, name: str) -> bool:
        """Whether the word is in it."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def require(self, variable: str, name: str) -> None:
        """Raises ApiError 400 for a field that the template does not look at."""
        if not self.knows(variable):
            raise bad(name, "is not supported: the model's chat template does not use it.", "unsupported_parameter")

    def kwargs(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What a request says to the template, besides its tools."""
        result: dict[str, Any] = {}
        for key, value in fields.get("chat_template_kwargs", {}).items():
            name = f"chat_template_kwargs.{key}"
            if key in self._own:
                raise bad(name, "is not for requests to say.", "unsupported_parameter")
            self.require(key, name)
            result[key] = value
        for key in ("reasoning_effort", "verbosity"):
            if key in fields:
                self.require(key, key)
                result[key] = fields[key]
        result |= {k: fields[k] for k in ("add_generation_prompt", "continue_final_message") if k in fields}
        if result.get("add_generation_prompt") and result.get("continue_final_message"):
            raise bad("continue_final_message", "and add_generation_prompt exclude each other.")
        return result


def read_messages(value: Any, template: ChatTemplate) -> list[dict[str, Any]]:
    """Messages with text as content; ApiError 400 names the message and the field."""
    if not isinstance(value, list) or not value:
        raise bad("messages", "must be a list of messages, at least one.")
    return [_message(f"messages[{i}]", message, template) for i, message in enumerate(value)]


def _message(where: str, value: Any, template: ChatTemplate) -> dict[str, Any]:
    message = checked(mapping(where, value), _MESSAGE, where)
    required(message, ["role"], where)
    for name in ("reasoning_content", "name"):
        if name in message:
            template.require(name, f"{where}.{name}")
    role = message["role"]
    if role == "developer" and not template.knows("developer"):
        message["role"] = "system"  # what the role was called before
    if "tool_calls" in message and role != "assistant":
        raise bad(f"{where}.tool_calls", "is for messages of the assistant.")
    if "content" not in message:
        if "tool_calls" not in message:
            raise bad(f"{where}.content", "is required.", "missing_required_parameter")
        message["content"] = ""  # templates look at its text
    return message


def _content(name: str, value: Any) -> str:
    """Text, or parts that are text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad(name, "must be a string or a list of parts.")
    texts = []
    for i, part in enumerate(value):
        where = f"{name}[{i}]"
        kind = mapping(where, part).get("type")
        one_of("text", reason="hf_cb takes text only")(f"{where}.type", kind)
        found = checked(part, {"type": text, "text": text}, where)
        required(found, ["text"], where)
        texts.append(found["text"])
    return "".join(texts)


def _tool_calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Calls that the model has made, their arguments as an object, which is what templates take."""
    if not isinstance(value, list):
        raise bad(name, "must be a list of tool calls.")
    calls = []
    for i, given in enumerate(value):
        where = f"{name}[{i}]"
        call = checked(mapping(where, given), _TOOL_CALL, where)
        required(call, ["function"], where)
        function = checked(call["function"], {"name": text, "arguments": text}, f"{where}.function")
        required(function, ["name", "arguments"], f"{where}.function")
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise bad(f"{where}.function.arguments", "must be JSON.") from None
        calls.append(call | {"function": function})
    return calls


def read_tools(value: Any, template: ChatTemplate) -> list[dict[str, Any]]:
    """The functions that a model may call, as its template takes them."""
    if not isinstance(value, list):
        raise bad("tools", "must be a list of tools.")
    template.require("tools", "tools")
    tools = []
    for i, given in enumerate(value):
        where = f"tools[{i}]"
        tool = checked(mapping(where, given), _TOOL, where)
        required(tool, ["type", "function"], where)
        function = checked(tool["function"], _FUNCTION, f"{where}.function")
        required(function, ["name"], f"{where}.function")
        function.pop("strict", None)
        tools.append({"type": "function", "function": function})
    return tools


_MESSAGE: dict[str, Check] = {
    "role": one_of(*_ROLES),
    "content": _content,
    "name": text,
    "tool_calls": _tool_calls,
    "tool_call_id": text,
    "reasoning_content": text,
    "refusal": refused("the template has no place for it"),
    "audio": refused("hf_cb takes text only"),
    "function_call": refused("it is deprecated, use tool_calls"),
}
_TOOL_CALL: dict[str, Check] = {"id": text, "type": one_of("function"), "function": mapping}
_TOOL: dict[str, Check] = {"type": one_of("function"), "function": mapping}
_FUNCTION: dict[str, Check] = {
    "name": text,
    "description": text,
    "parameters": mapping,
    "strict": one_of(False, reason="structured output and forced tools come later"),
}
