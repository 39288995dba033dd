"""Inputs that are no text, told by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TEXT_ONLY = "hf_cb takes text only; use model.generate for images, video and audio"
# words in the names of inputs that are no text, and of parts of a chat
_MEDIA = ("image", "video", "audio", "pixel", "input_features")


def media_inputs(inputs: Mapping[str, Any]) -> list[str]:
    """The names of inputs that are images, sound or video, or that say where in a prompt there are some."""
    found = [n for n, value in inputs.items() if value is not None and is_media(n)]
    marks = inputs.get("mm_token_type_ids")  # zeros where all is text
    return [*found, "mm_token_type_ids"] if marks is not None and _any_set(marks) else found


def _any_set(flags: Any) -> bool:
    return (
        any(map(_any_set, flags))
        if isinstance(flags, Sequence)
        else bool(flags.any() if hasattr(flags, "any") else flags)
    )


def is_media(name: str) -> bool:
    """Whether an input, or a part of a chat, of that name or type is no text."""
    return any(word in name for word in _MEDIA)
