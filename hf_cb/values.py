"""What kind of value an option was given. `True` is no number, and a whole number may be NumPy's."""

from __future__ import annotations

from typing import Any

from hf_cb.errors import OptionError


def is_whole(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Not NaN, which no comparison finds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def flag(name: str, value: Any) -> bool:
    """The value; OptionError unless it is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}.")
    return value
