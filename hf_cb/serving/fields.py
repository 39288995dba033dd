"""What a field of a request may hold: checks that return the value, or raise with the field's own name."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hf_cb.serving.errors import bad
from hf_cb.values import is_number

Check = Callable[[str, Any], Any]  # name and value (never None) -> the value, in one form


def number(least: float = -math.inf, most: float = math.inf, above: bool = False) -> Check:
    """A finite number within bounds; `above`: more than `least`."""

    def check(name: str, value: Any) -> float:
        fine = is_number(value) and abs(value) <= sys.float_info.max
        if not (fine and least <= value <= most and not (above and value == least)):
            raise bad(name, f"must be a number{_range(least, most, above)}, not {_short(value)}.")
        return float(value)

    return check


def whole(least: int = -(2**63), most: int = 2**63 - 1) -> Check:
    """A whole number within bounds."""

    def check(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            limits = _range(least if least > -(2**63) else -math.inf, most if most < 2**63 - 1 else math.inf)
            raise bad(name, f"must be a whole number{limits}, not {_short(value)}.")
        return value

    return check


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise bad(name, f"must be true or false, not {_short(value)}.")
    return value


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise bad(name, f"must be a string, not {_short(value)}.")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(name, f"must be an object, not {_short(value)}.")
    return value


def texts(name: str, value: Any) -> list[str]:
    """A string or a list of them, none empty."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise bad(name, f"must be a string or a list of strings, none of them empty, not {_short(value)}.")
    return values


def token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v < 2**31 for v in value):
        raise bad(name, f"must be a list of token ids, not {_short(value)}.")
    return value


def biases(name: str, value: Any) -> dict[int, float]:
    """Token ids (JSON has them as strings) to numbers from -100 to 100."""
    result = {}
    for key, bias in mapping(name, value).items():
        if not key.isdecimal() or len(key) > 10:
            raise bad(name, f"must have token ids as keys, not {_short(key)}.")
        result[int(key)] = number(-100, 100)(f"{name}[{key}]", bias)
    return result


def one_of(*allowed: Any, reason: str = "") -> Check:
    """One of a few values; the reason is why there are no others."""

    def check(name: str, value: Any) -> Any:
        if not any(type(value) is type(a) and value == a for a in allowed):
            choice = " or ".join(repr(a) if isinstance(a, str) else str(a).lower() for a in allowed)
            how = f"can only be {choice} here" if allowed else "is not supported"
            raise bad(name, f"{how}, not {_short(value)}{reason and ': ' + reason}.", "unsupported_value")
        return value

    return check


def refused(reason: str) -> Check:
    """No value at all (null is the same as leaving a field out)."""

    def check(name: str, value: Any) -> Any:
        raise bad(name, f"is not supported: {reason}.", "unsupported_parameter")

    return check


def checked(body: Mapping[str, Any], checks: Mapping[str, Check], where: str = "") -> dict[str, Any]:
    """The fields that are given, each checked; null is the same as nothing.

    Raises:
        ApiError: 400, with the name of a field that is unknown, wrong or not served.
    """
    result = {}
    for key, value in body.items():
        name = f"{where}.{key}" if where else key
        if key not in checks:
            raise bad(name, "is not a field that this server knows.", "unknown_parameter")
        if value is not None:
            result[key] = checks[key](name, value)
    return result


def required(fields: Mapping[str, Any], names: Collection[str], where: str = "") -> None:
    for name in names:
        if name not in fields:
            raise bad(f"{where}.{name}" if where else name, "is required.", "missing_required_parameter")


def _range(least: float, most: float, above: bool = False) -> str:
    if least == -math.inf and most == math.inf:
        return ""
    if most == math.inf:
        return f" above {least:g}" if above else f" from {least:g} up"
    return f" above {least:g} and at most {most:g}" if above else f" from {least:g} to {most:g}"


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
