"""A trace: when requests came, and how long their prompts and answers were; as a file, one JSON object a line.

`manager.record` writes such files and `hf-cb replay` reads them. Prompts may be there as they were, as hashes of their
blocks, from which prompts with the same beginnings can be made again (the idea is Mooncake's: Qin et al., FAST 2025),
or as lengths alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_cb.errors import OptionError

VERSION = 1
HASH_BLOCK = 16  # tokens; of traces that we write
KEYS = frozenset({"arrival", "prompt_tokens", "output_tokens", "prompt", "hash_ids", "options"})


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Args:
        at: seconds since the beginning of the trace.
        prompt_tokens: 0 if only `prompt` knows.
        output_tokens: of the answer.
        prompt: text, a chat or token ids, where it is known.
        hash_ids: one number for each block of the prompt; prompts whose first numbers are equal begin alike.
        options: arguments of `submit`, such as `priority`.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    prompt: Any = None
    hash_ids: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As in a file; what is empty is left out."""
        row = {"arrival": round(self.at, 6), "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        rest = {"prompt": self.prompt, "hash_ids": list(self.hash_ids), "options": dict(self.options)}
        return row | {name: value for name, value in rest.items() if value}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Arrival:
        """Raises OptionError about a key that is missing, unknown or wrong."""
        if unknown := sorted(set(row) - KEYS):
            raise OptionError(f"{unknown[0]!r} is unknown; a request has {', '.join(sorted(KEYS))}.")
        at, prompt = row.get("arrival"), row.get("prompt")
        if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < float("inf"):
            raise OptionError(f"arrival={at!r} must be a number of seconds from 0 up.")
        tokens = row.get("prompt_tokens", 0 if prompt else None)
        for name, value, least in (("prompt_tokens", tokens, 0 if prompt else 1), ("output_tokens", None, 1)):
            value = row.get(name) if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name}={value!r} must be a whole number from {least} up.")
        hashes, options = row.get("hash_ids") or (), row.get("options") or {}
        if not isinstance(options, Mapping) or any(isinstance(h, bool) or not isinstance(h, int) for h in hashes):
            raise OptionError("hash_ids must be whole numbers, and options an object.")
        return cls(float(at), tokens or 0, row["output_tokens"], prompt, tuple(hashes), dict(options))


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, the first at 0.

    `hash_block`: tokens of a prompt that one of its `hash_ids` stands for; its last may stand for fewer.
    """

    name: str
    arrivals: tuple[Arrival, ...]
    hash_block: int = HASH_BLOCK

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at if self.arrivals else 0.0

    def lines(self) -> Iterable[str]:
        """The file's lines, each with its end."""
        yield header(self.hash_block)
        for arrival in self.arrivals:
            yield json.dumps(arrival.as_dict(), ensure_ascii=False) + "\n"


def header(hash_block: int = HASH_BLOCK) -> str:
    """The first line of a file."""
    return json.dumps({"hf_cb_trace": VERSION, "hash_block": hash_block}) + "\n"


def in_order(name: str, arrivals: Iterable[Arrival], hash_block: int) -> Trace:
    """A Trace of requests in any order and from any time on.

    Raises:
        OptionError: there are none.
    """
    ordered = sorted(arrivals, key=lambda a: a.at)
    if not ordered:
        raise OptionError(f"The trace {name} has no requests.")
    began = ordered[0].at
    moved = (Arrival(a.at - began, a.prompt_tokens, a.output_tokens, a.prompt, a.hash_ids, a.options) for a in ordered)
    return Trace(name, tuple(moved), hash_block)
