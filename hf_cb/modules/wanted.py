"""Which models are to have faster modules: set by `accelerate`, looked up when an engine is built."""

from __future__ import annotations

import weakref
from typing import Any, Literal

Mode = Literal["fused", "leaf", "off"]
MODES: tuple[Mode, ...] = ("fused", "leaf", "off")

_wanted: weakref.WeakKeyDictionary[Any, Mode] = weakref.WeakKeyDictionary()


def want(model: Any, mode: Mode | None) -> None:
    """Sets a model's mode; None takes it back."""
    if mode is None:
        _wanted.pop(model, None)
    else:
        _wanted[model] = mode


def wanted(model: Any) -> Mode:
    return _wanted.get(model, "off")
