"""The lines of a job's input: what each of them asks for, and how to tell that it is still the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_cb.errors import OptionError, PromptError

# arguments of `submit` that are the job's own affair, make an answer depend on the clock, or have no place in a record
_RESERVED = frozenset(
    {"request_id", "index", "tokenizer", "generation_config", "queue_wait", "max_queue_time", "deadline", "self"}
    | {"output_logits", "output_scores"}
)
_PROMPTS = ("prompt", "messages", "prompt_ids")
_URLS = {"/v1/chat/completions": True, "/v1/completions": False}


@dataclass(frozen=True)
class Line:
    """One line that is not blank: its place among those, its number in the file from 1, and its bytes."""

    index: int
    number: int
    raw: bytes

    def digest(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()[:16]


@dataclass(frozen=True)
class Task:
    """What a line asks for: a prompt with options, or a request to OpenAI's API as its batch files have them.

    `name` is the line's own id, under the name that it has there.
    """

    name: dict[str, Any]
    prompt: Any = None
    options: dict[str, Any] | None = None
    body: dict[str, Any] | None = None
    is_chat: bool = False


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file, one at a time."""
    index = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            raw = raw.strip()
            if raw:
                yield Line(index, number, raw)
                index += 1


def read_task(line: Line) -> Task:
    """What the line asks for.

    Raises:
        PromptError, OptionError: it is no JSON object, or asks for nothing that there is.
    """
    try:
        given = json.loads(line.raw)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"line {line.number} is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise PromptError(f"line {line.number} must be a JSON object.")
    name = {key: given.pop(key) for key in ("id", "custom_id") if key in given}
    if "body" in given:
        return _openai_task(given, name)
    prompts = [key for key in _PROMPTS if key in given]
    if len(prompts) != 1:
        raise PromptError(f"line {line.number} must have one of {', '.join(_PROMPTS)}, and has {prompts or 'none'}.")
    prompt = given.pop(prompts[0])
    kinds = {"prompt": str, "messages": list, "prompt_ids": list}
    if not isinstance(prompt, kinds[prompts[0]]):
        raise PromptError(f"line {line.number}: {prompts[0]} must be a {kinds[prompts[0]].__name__}.")
    for key in _RESERVED & given.keys():
        raise OptionError(f"{key!r} is not for a line of a file to say.")
    if not isinstance(given.get("chat_template_kwargs") or {}, dict):
        raise OptionError(f"line {line.number}: chat_template_kwargs must be an object.")
    return Task(name, prompt, sampling(given))


def _openai_task(given: dict[str, Any], name: dict[str, Any]) -> Task:
    url, method = given.pop("url", None), given.pop("method", "POST")
    if url not in _URLS or method != "POST":
        raise OptionError(f"{method} {url} is not served: there are {', '.join(_URLS)}, by POST.")
    body = given.pop("body")
    if not isinstance(body, dict) or given:
        raise OptionError(f"body must be an object, beside custom_id, method and url alone: {list(given)}.")
    if body.get("stream"):
        raise OptionError("stream has no meaning in a file.")
    return Task(name, body=body, is_chat=_URLS[url])


def sampling(options: dict[str, Any]) -> dict[str, Any]:
    """The same options, and `do_sample`, where it is not given, as they mean it: temperature 0 is greedy."""
    options = dict(options)
    if "do_sample" not in options:
        if options.get("temperature") == 0:
            options["do_sample"] = False
        elif any(options.get(key) is not None for key in ("temperature", "top_p", "top_k", "min_p")):
            options["do_sample"] = True
    if options.get("temperature") == 0:
        del options["temperature"]
    return options
