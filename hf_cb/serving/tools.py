"""Tool calls in a model's text, as Hermes and Qwen write them: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`.

Models that write their calls in another way are served too; their calls stay text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON

    def as_json(self, of: str, index: int) -> dict[str, Any]:
        """OpenAI's object for the call of that index in the answer (its id, and the choice's number) `of`."""
        own_id = hashlib.sha256(f"{of} {index}".encode()).hexdigest()[:24]
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{own_id}", "type": "function", "function": function}


class ToolCallReader:
    """Takes text as it comes and gives text and calls, in order, the same for any split of the text.

    What is no call after all comes out as text. Blanks before a call are dropped, and after the last one.

    Args:
        at_most_one: later calls are dropped (`parallel_tool_calls=false`).
    """

    def __init__(self, at_most_one: bool = False) -> None:
        self.num_calls = 0
        self._at_most_one = at_most_one
        self._waiting = ""
        self._blanks = ""

    def push(self, text: str) -> list[str | ToolCall]:
        self._waiting += text
        found: list[str | ToolCall] = []
        while (start := self._waiting.find(OPEN)) >= 0:
            end = self._waiting.find(CLOSE, start)
            self._give_text(self._waiting[:start], found)
            self._waiting = self._waiting[start:]
            if end < 0:
                return found
            whole = self._waiting[: end - start + len(CLOSE)]
            self._waiting = self._waiting[len(whole) :]
            self._give_call(whole, found)
        end = len(self._waiting) - _overlap(self._waiting, OPEN)
        self._give_text(self._waiting[:end], found)
        self._waiting = self._waiting[end:]
        return found

    def finish(self) -> list[str | ToolCall]:
        """The rest. A last call needs no closing tag: some models end without it."""
        found: list[str | ToolCall] = []
        rest, self._waiting = self._waiting, ""
        if rest.startswith(OPEN):
            self._give_call(rest, found)
        else:
            self._give_text(rest, found)
        if self._blanks and not self.num_calls:
            found.append(self._blanks)
        return found

    def _give_text(self, text: str, found: list[str | ToolCall]) -> None:
        text = self._blanks + text
        solid = text.rstrip()
        self._blanks = text[len(solid) :]
        if solid:
            found.append(solid)

    def _give_call(self, text: str, found: list[str | ToolCall]) -> None:
        call = _parse(text.removeprefix(OPEN).removesuffix(CLOSE))
        if call is None:
            self._give_text(text, found)
            return
        self._blanks = ""
        self.num_calls += 1
        if self.num_calls == 1 or not self._at_most_one:
            found.append(call)


def _parse(text: str) -> ToolCall | None:
    try:
        given = json.loads(text)
    except ValueError:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    arguments = given.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(given["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of the text may be the beginning of the tag."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
