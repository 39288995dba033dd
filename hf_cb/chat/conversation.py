"""One turn of a conversation, without any user interface: a history and settings in, the growing answer out.

A history is Gradio's: messages `{"role", "content"}`, whose content is text or a list of blocks. An answer has a second
block, the line under it; what the model sees of a message is its first block alone.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from hf_cb.errors import HfCbError
from hf_cb.html import figures
from hf_cb.manager.handle import Handle
from hf_cb.manager.manager import ContinuousBatchingManager

Message = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What one person has set; others in the same batch have their own."""

    system: str = ""
    max_new_tokens: int = 512
    temperature: float = 0.2  # 0: greedy
    top_p: float = 0.9
    repetition_penalty: float = 1.0
    seed: int | None = None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of `submit`."""
        options: dict[str, Any] = {
            "max_new_tokens": int(self.max_new_tokens),
            "repetition_penalty": float(self.repetition_penalty),
            "do_sample": self.temperature > 0,
        }
        if self.temperature > 0:
            options |= {"temperature": float(self.temperature), "top_p": float(self.top_p), "seed": self.seed}
        return options


def text_of(message: Message) -> str:
    """A message's own words."""
    content = message["content"]
    first = content[0] if isinstance(content, list) and content else content
    if isinstance(first, dict):
        return str(first.get("text", ""))
    return str(first or "")


def to_chat(history: list[Message], system: str) -> list[dict[str, str]]:
    """The conversation as a chat template takes it, without questions that got an error and no word of an answer."""
    chat = [{"role": "system", "content": system}] if system.strip() else []
    for message in history:
        text = text_of(message)
        if message["role"] == "assistant" and not text:
            if chat and chat[-1]["role"] == "user":
                chat.pop()
        else:
            chat.append({"role": message["role"], "content": text})
    return chat


async def answer(
    manager: ContinuousBatchingManager,
    history: list[Message],
    settings: Settings,
    started: Callable[[Handle], None] = lambda handle: None,
) -> AsyncGenerator[Message]:
    """The assistant's message as it grows, with its line at the end. Errors are messages too.

    `started` gets the handle, for whoever may want to cancel it. Leaving early cancels the request.
    """
    try:
        # template and tokenizer take milliseconds that other people's streams need
        handle = await asyncio.to_thread(manager.submit, to_chat(history, settings.system), **settings.options())
    except (HfCbError, TypeError, ValueError) as error:
        yield _message("", _problem(error))
        return
    started(handle)
    text = ""
    try:
        async for delta in handle:
            text += delta.text
            if delta.finish_reason is None:
                yield _message(text)
        yield _message(text, f"<small class='figures'>{figures(handle.outputs()[0])}</small>")
    except Exception as error:  # the request's own
        yield _message(text, _problem(error))
    finally:
        handle.cancel()


def _message(text: str, line: str | None = None) -> Message:
    blocks = [{"type": "text", "text": text}]
    if line is not None:
        blocks.append({"type": "text", "text": line})
    return {"role": "assistant", "content": blocks}


def _problem(error: BaseException) -> str:
    return f"<small class='problem'>⚠ {html.escape(str(error) or type(error).__name__)}</small>"
