"""Parameters of policies, checked when one is made."""

from __future__ import annotations

import math
from typing import Any

from hf_cb.errors import OptionError
from hf_cb.values import is_number, is_whole


def check_count(policy: str, name: str, value: Any) -> None:
    """None or a whole number from 1 up; OptionError otherwise."""
    if value is None:
        return
    if not is_whole(value) or value < 1:
        raise OptionError(f"{name} of the policy {policy!r} must be a whole number from 1 up, not {value!r}.")


def check_seconds(policy: str, name: str, value: Any) -> None:
    """A finite number of seconds from 0 up, since nothing may wait for ever; OptionError otherwise."""
    if not is_number(value) or not 0 <= value < math.inf:
        raise OptionError(f"{name} of the policy {policy!r} must be a number of seconds from 0 up, not {value!r}.")


def check_weight(policy: str, name: str, value: Any) -> None:
    """A finite number above 0; OptionError otherwise."""
    if not is_number(value) or not 0 < value < math.inf:
        raise OptionError(f"{name} of the policy {policy!r} must be a number above 0, not {value!r}.")
