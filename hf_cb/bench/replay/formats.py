"""Traces from files: our own, the public ones of Azure and of Mooncake; and cut to what a machine can take.

Azure's "LLM inference trace" (Patel et al., ISCA 2024; Stojkovic et al., HPCA 2025) is a CSV table with TIMESTAMP,
ContextTokens and GeneratedTokens. Mooncake's (Qin et al., FAST 2025) has one JSON object a line: timestamp in
milliseconds, input_length, output_length, and hash_ids, one for each 512 tokens of the prompt.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hf_cb.arrivals import HASH_BLOCK, VERSION, Arrival, Trace, in_order
from hf_cb.errors import OptionError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
MOONCAKE_BLOCK = 512


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """A trace in any of the three formats, which its first line tells apart.

    Args:
        limit: only the first requests. Ours are sorted for that, as a recording has those first that ended first; of
            the public ones, which are in order and long, no more lines are read.

    Raises:
        OptionError: no such file, another format, or a line that is wrong, by its number.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            if all(name in first for name in AZURE):
                return in_order(path.name, itertools.islice(_azure(path, file), limit), HASH_BLOCK)
            rows = _objects(path, file)
            number, row = next(rows, (1, {}))
            if "hf_cb_trace" in row:
                if row["hf_cb_trace"] != VERSION:
                    raise OptionError(f"{path} has version {row['hf_cb_trace']!r} of the format; {VERSION} is known.")
                return _ours(path, rows, limit, row.get("hash_block", HASH_BLOCK))
            rows = itertools.chain([(number, row)], rows)
            if all(name in row for name in MOONCAKE):
                return _made(path, itertools.islice(rows, limit), _mooncake, MOONCAKE_BLOCK)
            if "arrival" in row:
                return _ours(path, rows, limit, HASH_BLOCK)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise OptionError(f"The trace {path} cannot be read: {error}") from error
    raise OptionError(
        f"{path} is no trace that is known: its first line has neither arrival, prompt_tokens and output_tokens nor "
        f"{', '.join(AZURE)} (Azure) nor {', '.join(MOONCAKE)} (Mooncake)."
    )


def _ours(path: Path, rows: Iterable[tuple[int, dict[str, Any]]], limit: int | None, hash_block: Any) -> Trace:
    if isinstance(hash_block, bool) or not isinstance(hash_block, int) or hash_block < 1:
        raise OptionError(f"{path}: hash_block={hash_block!r} must be a whole number of tokens from 1 up.")
    trace = _made(path, rows, Arrival.from_dict, hash_block)
    return replace(trace, arrivals=trace.arrivals[:limit])


def _made(
    path: Path,
    rows: Iterable[tuple[int, dict[str, Any]]],
    make: Callable[[Mapping[str, Any]], Arrival],
    hash_block: int,
) -> Trace:
    arrivals = []
    for number, row in rows:
        try:
            arrivals.append(make(row))
        except (OptionError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"{path}, line {number}: {error}") from error
    return in_order(path.name, arrivals, hash_block)


def _objects(path: Path, file: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise OptionError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise OptionError(f"{path}, line {number} is no JSON object.")
        yield number, row


def _azure(path: Path, file: Iterable[str]) -> Iterator[Arrival]:
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"].strip())
            seconds = (at - datetime(1970, 1, 1, tzinfo=at.tzinfo)).total_seconds()
            # a request without a token, of which there are a few, was one all the same
            prompt, output = (max(1, int(row[name])) for name in AZURE[1:])
            yield Arrival(seconds, prompt, output)
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(f"{path}, line {number} has no {', '.join(AZURE)}: {error}") from error


def _mooncake(row: Mapping[str, Any]) -> Arrival:
    at, prompt, output = (row[name] for name in MOONCAKE)
    return Arrival.from_dict(
        {
            "arrival": float(at) / 1e3,
            "prompt_tokens": max(1, int(prompt)),
            "output_tokens": max(1, int(output)),
            "hash_ids": row.get("hash_ids"),
        }
    )


@dataclass(frozen=True)
class Shaped:
    """A trace as it is replayed, and how many of its requests were shortened for that."""

    trace: Trace
    clipped: int

    @property
    def fingerprint(self) -> str:
        """Of times and lengths: equal for the same arrivals."""
        text = "".join(self.trace.lines())
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def shape(trace: Trace, speed: float = 1.0, limit: int | None = None, max_len: int | None = None) -> Shaped:
    """The trace `speed` times as fast, its first `limit` requests, each with at most `max_len` tokens.

    Where prompt and output together are longer, the output keeps at most half of that, and the prompt its beginning.
    """
    if not 0 < speed < float("inf"):
        raise OptionError(f"speed={speed} must be a positive number.")
    if max_len is not None and max_len < 2:
        raise OptionError(f"max_len={max_len} must be at least 2: a token of prompt and one of output.")
    arrivals, clipped = [], 0
    for arrival in trace.arrivals[:limit]:
        prompt, output = arrival.prompt_tokens, arrival.output_tokens
        if max_len is not None and prompt + output > max_len:
            output = min(output, max(max_len // 2, max_len - prompt))
            prompt = min(prompt, max_len - output)
            clipped += 1
        arrivals.append(replace(arrival, at=arrival.at / speed, prompt_tokens=prompt, output_tokens=output))
    return Shaped(in_order(trace.name, arrivals, trace.hash_block), clipped)
