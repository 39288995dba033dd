"""Numbers on the command line, checked where argparse can name the option."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number from 1 up."""
    return _whole(text, least=1)


def count_or_zero(text: str) -> int:
    """A whole number from 0 up."""
    return _whole(text, least=0)


def not_negative(text: str) -> float:
    """A number from 0 up."""
    return _number(text, most=float("inf"))


def positive(text: str) -> float:
    """A number above 0."""
    value = _number(text, most=float("inf"))
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    return _number(text, most=1.0)


def step_time(text: str) -> tuple[float, float, float]:
    """One to three numbers from 0 up, the first above 0, with colons; what is missing is 0."""
    first, *rest = (not_negative(part) for part in text.split(":"))
    if first == 0 or len(rest) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not S, S:ROW or S:ROW:TOKEN, with S above 0")
    per_row, per_token = [*rest, 0.0, 0.0][:2]
    return first, per_row, per_token


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
    return value


def _number(text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most or value == float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 {'up' if most > 1 else 'to 1'}")
    return value
