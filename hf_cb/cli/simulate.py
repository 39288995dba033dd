"""Show the scheduler at work, step by step, on a list of requests and without a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_cb.cli.numbers import count, step_time
from hf_cb.errors import OptionError

if TYPE_CHECKING:
    from hf_cb.core import Request
    from hf_cb.engine.simulation import SimulatedRequest, SimulatedStep

EXAMPLE = (
    "Without FILE: the worked example, with 5 tokens and 2 requests a step. A has 2 and B has 4 output tokens left, "
    "and C waits with a prompt of 7."
)
FORMAT = (
    'a JSON list, or a JSON object a line, with "prompt" and "output" (lengths in tokens), and if wanted "name", '
    '"arrival" and "deadline" (seconds, the deadline from the arrival on), "priority", "user", "running" (true: at the '
    'start it has its first token), "prefix" and "prefix_tokens" (a name for the beginning that it shares with others, '
    "and its length)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{parser.description} {EXAMPLE}"
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=f"{FORMAT}; - for standard input")
    group = parser.add_argument_group("engine")
    group.add_argument("--policy", default="continuous", help='such as "static:8" (default: %(default)s)')
    group.add_argument("--max-batch-tokens", type=count, metavar="N", help="query tokens in a step")
    group.add_argument("--max-num-seqs", type=count, metavar="N", help="requests in a step")
    group.add_argument("--prefill-chunk", type=count, metavar="N", help="prompt tokens in a step while answers run")
    group.add_argument("--itl-target", type=float, metavar="S", help="seconds between two tokens of a running answer")
    group.add_argument("--num-blocks", type=count, metavar="N", help="KV blocks (default: enough for all)")
    group.add_argument("--block-size", type=count, metavar="N", help="tokens in a KV block (default: 32)")
    group.add_argument("--no-prefix-caching", action="store_true", help="compute equal beginnings anew")
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--step-time",
        type=step_time,
        default=(1.0, 0.0, 0.0),
        metavar="S[:ROW[:TOKEN]]",
        help="seconds of a step, and what each generating row and each prompt token add (default: 1)",
    )
    group.add_argument("--json", action="store_true", help="one JSON object a line for each step")


def run(args: argparse.Namespace) -> int:
    """Prints a table of the steps and one of the requests."""
    names = ("policy", "max_batch_tokens", "max_num_seqs", "prefill_chunk", "itl_target", "num_blocks", "block_size")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    from hf_cb.config import EngineConfig
    from hf_cb.engine.simulation import WORKED_BUDGETS, WORKED_EXAMPLE, Simulation

    if args.file is None:
        given, options = WORKED_EXAMPLE, WORKED_BUDGETS | options
    else:
        given = _read(args.file)
    base, per_row, per_token = args.step_time
    config = EngineConfig.of(None, prefix_caching=not args.no_prefix_caching, **options)
    simulation = Simulation(given, config, lambda rows, tokens: base + per_row * rows + per_token * tokens)
    if args.json:
        for step in simulation:
            print(json.dumps(_as_dict(step)), flush=True)
        return 0
    steps = list(simulation)
    _print_table(STEP_COLUMNS, list(_step_rows(steps)))
    print()
    _print_table(REQUEST_COLUMNS, [_request_row(r) for r in simulation.requests])
    return 0


STEP_COLUMNS = ("step", "at", "contents", "tokens", "requests", "blocks", "waiting", "bound by", "")
REQUEST_COLUMNS = ("request", "arrival", "started", "first token", "end", "reason", "gave way")


def _step_rows(steps: Sequence[SimulatedStep]) -> Any:
    number = 0
    for step in steps:
        events = [f"{name}'s first token" for name in step.first_tokens]
        events += [f"{name} gives way" for name in step.gave_way]
        events += [f"{r.request_id} ends" for r in step.ended if r.finish_reason == "length"]
        events += [f"{r.request_id} ends: {r.finish_reason}" for r in step.ended if r.finish_reason != "length"]
        at, notes, record = f"{step.at:g}", ", ".join(events), step.record
        if record is None:
            held = f"nobody is let in until {step.until:g}"
            yield "", at, "-", "", "", "", "", "policy", f"{held}, {notes}" if notes else held
            continue
        number += 1
        yield (
            str(number),
            at,
            "+".join(f"{name}{tokens}" for name, tokens in step.parts),
            f"{record.query_tokens}/{record.tokens_allowed}",
            f"{record.requests}/{record.requests_allowed}",
            f"{record.blocks_used}/{record.blocks_allowed}",
            str(record.waiting),
            record.bound_by or "-",
            notes,
        )


def _request_row(request: Request) -> tuple[str, ...]:
    def time(value: float | None) -> str:
        return "-" if value is None else f"{value:g}" if value > 0 or request.created >= 0 else "before"

    reason = f"{request.finish_reason}{', will miss its deadline' if request.metrics.will_miss else ''}"
    times = (request.created, request.started, request.first_token, request.finished)
    return (request.request_id, *map(time, times), reason, str(request.metrics.preemptions))


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _as_dict(step: SimulatedStep) -> dict[str, Any]:
    return {
        "at": step.at,
        "until": step.until,
        "contents": dict(step.parts),
        "bound_by": "policy" if step.record is None else step.record.bound_by,
        "first_tokens": step.first_tokens,
        "gave_way": step.gave_way,
        "ended": {r.request_id: r.finish_reason for r in step.ended},
    }


def _read(path: Path) -> list[SimulatedRequest]:
    """The requests of a file.

    Raises:
        OptionError: it cannot be read, or an entry is not understood; the message says which.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read: {error}") from error
    try:
        whole = text.lstrip().startswith("[")
        entries = json.loads(text) if whole else [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise OptionError(f"{path} is neither a JSON list nor a JSON object a line: {error}") from error
    if not entries:
        raise OptionError(f"{path} has no requests.")
    return [_one(entry, place) for place, entry in enumerate(entries)]


NEEDED = {"prompt": 1, "output": 1}  # and the least value of each
MOST = 2**22  # tokens of a request, and seconds: no model reads so many, and a list of all of them is kept
LEAST: dict[str, float] = {**NEEDED, "arrival": 0, "deadline": 0, "prefix_tokens": 0, "priority": float("-inf")}
KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "prompt": (int,),
    "output": (int,),
    "arrival": (int, float),
    "running": (bool,),
    "priority": (int,),
    "user": (str,),
    "deadline": (int, float),
    "prefix": (str,),
    "prefix_tokens": (int,),
}


def _one(entry: Any, place: int) -> SimulatedRequest:
    from hf_cb.engine.simulation import SimulatedRequest

    if not isinstance(entry, dict):
        raise OptionError(f"Request {place} must be a JSON object, not {entry!r}.")
    known = {f.name: f.default is MISSING for f in fields(SimulatedRequest)}
    for name, value in entry.items():
        if name not in known:
            raise OptionError(f"Request {place} has {name!r}; known are {', '.join(known)}.")
        right = type(value) in KINDS[name] and (name not in LEAST or LEAST[name] <= value <= MOST)
        if not right:
            raise OptionError(f"Request {place}: {name} is {value!r}; wanted is {_words(name)}.")
    missing = [name for name in NEEDED if name not in entry]
    if missing:
        raise OptionError(f"Request {place} has no {' and no '.join(missing)}.")
    given: dict[str, Any] = {"name": _letters(place)} | entry
    return SimulatedRequest(**given)


def _words(name: str) -> str:
    words = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
    kind = words[KINDS[name][-1]]
    least = LEAST.get(name, float("-inf"))
    return kind if least == float("-inf") else f"{kind} from {least:g} to {MOST:,}"


def _letters(place: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    letters = ""
    while place >= 0:
        place, rest = divmod(place, 26)
        letters, place = chr(ord("A") + rest) + letters, place - 1
    return letters
