"""Small tools to stand in for a module's forward during a step (`attention.interception.Drive`)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from hf_cb.errors import UnsupportedModelError

_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # transformers' names over the versions


@functools.cache
def _arguments(cls: Any, method: str) -> list[str]:
    return list(inspect.signature(getattr(cls, method)).parameters)[1:]


@functools.cache
def cache_argument(cls: Any, method: str = "forward") -> str:
    """The name under which a method of a module class takes a cache, or an empty one."""
    return next((name for name in _CACHE_ARGUMENTS if name in _arguments(cls, method)), "")


def name_arguments(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a module's forward, all by name."""
    return dict(zip(_arguments(cls, "forward"), args, strict=False)) | kwargs


def check_drivable(module: nn.Module) -> None:
    """Raises UnsupportedModelError for a module whose forward is neither its class's nor under accelerate's hook."""
    if "forward" in vars(module) and "_old_forward" not in vars(module):
        raise UnsupportedModelError(
            f"{type(module).__name__} must see each request by itself, and has a forward that is not its class's."
        )
