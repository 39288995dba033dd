"""Chats through a chat template, straight to ids."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_cb.errors import PromptError
from hf_cb.text.media import TEXT_ONLY, is_media
from hf_cb.text.tokenizers import tokenizer_lock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

short = reprlib.repr


def encode_chat(
    chat: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> Any:
    """What the chat template makes of a chat: ids, or a mapping with them.

    Raises:
        PromptError: a message without a role or content, one with media, no template, or one that refuses the chat.
    """
    _check_messages(chat)
    for part in (part for message in chat for part in _parts(message.get("content"))):
        if is_media(str(part.get("type"))):
            raise PromptError(f"a content part of type {part['type']!r} in the chat {short(chat)}: {TEXT_ONLY}")
    if not template_kwargs.get("chat_template") and not getattr(tokenizer, "chat_template", "unknown"):
        raise PromptError(
            f"the tokenizer has no chat template for the chat {short(chat)}; set tokenizer.chat_template, "
            "pass chat_template in chat_template_kwargs, or pass text or token ids"
        )
    # transformers refuses a generation prompt after a message that is to be continued.
    generation_prompt = not template_kwargs.get("continue_final_message")
    options: dict[str, Any] = {
        "add_generation_prompt": generation_prompt,
        "return_dict": False,
        **template_kwargs,
    }
    try:
        with tokenizer_lock(tokenizer):
            encoding: Any = tokenizer.apply_chat_template([dict(message) for message in chat], **options)
    except Exception as error:
        raise PromptError(f"the chat template refused {short(chat)}: {error}") from error
    if isinstance(encoding, str):
        raise TypeError("the chat template gave text, not ids; leave tokenize=False out of chat_template_kwargs")
    return encoding


def _check_messages(chat: Sequence[Any]) -> None:
    """A template renders a message that lacks its text as an empty one, without a word."""
    for place, message in enumerate(chat):
        if not isinstance(message, Mapping) or "role" not in message:
            raise PromptError(f"message {place} of the chat {short(chat)} has no role: {short(message)}")
        if not any(key == "tool_calls" or key.endswith("content") for key in map(str, message)):
            raise PromptError(f"message {place} of the chat has no content, only {list(message)}: {short(message)}")


def _parts(content: Any) -> list[Mapping[str, Any]]:
    return [part for part in content if isinstance(part, Mapping)] if not isinstance(content, str | None) else []
