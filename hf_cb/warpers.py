"""`generate`'s four common warpers as plain numbers: a sampler that knows them need not call transformers' own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Warpers:
    """In the order in which they are applied. The defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


_ORDER: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


def as_warpers(processors: Iterable[Any]) -> Warpers | None:
    """What these processors do, or None if it is more than the four do in their usual order."""
    found, names = Warpers(), list(_ORDER.values())
    for processor in processors:
        name = _ORDER.get(type(processor))
        usual = getattr(processor, "filter_value", -float("inf")) == -float("inf")
        if name not in names or not usual or (name != "top_k" and getattr(processor, "min_tokens_to_keep", 1) != 1):
            return None
        names = names[names.index(name) + 1 :]
        found = replace(found, **{name: getattr(processor, name)})
    return found
