"""Replay the same arrivals against two settings or more, and say what differs beyond chance."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_cb.cli import model as models
from hf_cb.cli.job import INTERRUPTED
from hf_cb.cli.numbers import count, count_or_zero, not_negative, share
from hf_cb.errors import OptionError
from hf_cb.words import duration

if TYPE_CHECKING:
    from hf_cb.bench.replay.turn import Turn
    from hf_cb.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    group = parser.add_argument_group("trace")
    group.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="of manager.record(), Azure or Mooncake")
    group.add_argument("--generate", metavar="KIND", help="make one instead: poisson or bursty arrivals")
    group.add_argument("--rate", type=not_negative, default=2.0, metavar="R", help="a second (default: %(default)s)")
    group.add_argument("--requests", type=count, default=64, metavar="N", help="to make (default: %(default)s)")
    group.add_argument(
        "--burstiness",
        type=not_negative,
        default=3.0,
        metavar="C",
        help="of bursty; 1 is poisson (default: %(default)s)",
    )
    lengths = "tokens: N, uniform:LEAST:MOST or lognormal:MEDIAN:SIGMA (default: %(default)s)"
    group.add_argument("--prompt-lengths", default="lognormal:128:0.8", metavar="LENGTHS", help=lengths)
    group.add_argument("--output-lengths", default="uniform:16:256", metavar="LENGTHS", help=lengths)
    group.add_argument(
        "--seed", type=count_or_zero, default=0, metavar="N", help="of what is random (default: %(default)s)"
    )
    group.add_argument(
        "--speed", type=not_negative, default=1.0, metavar="X", help="times as fast (default: %(default)s)"
    )
    group.add_argument("--limit", type=count, metavar="N", help="only the first N requests")
    group.add_argument("--max-len", type=count, metavar="N", help="shorten requests to N tokens (default: the model's)")
    group.add_argument("--save-trace", type=Path, metavar="FILE", help="write the trace there, as it is replayed")
    group = parser.add_argument_group("settings", "key=value,key=value of EngineConfig's fields, or a JSON file")
    group.add_argument("--a", metavar="SETTINGS", help="one setting (default with --b: the defaults)")
    group.add_argument("--b", metavar="SETTINGS", help="the other")
    group.add_argument(
        "--setting", action="append", default=[], metavar="NAME:SETTINGS", help="a further one; may be repeated"
    )
    group.add_argument("--sweep", metavar="KEY=V,V", help="a setting for each of these values, instead")
    group.add_argument("--base", default="", metavar="SETTINGS", help="what all of them have")
    group.add_argument("--compare", nargs=2, type=Path, metavar="JSON", help="two files of --json; nothing is run")
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--repeat", type=count, default=4, metavar="N", help="rounds; fewer than 3 tell little (default: %(default)s)"
    )
    group.add_argument("--slo", metavar="TERMS", help="such as ttft=500ms,itl_p95=50ms")
    group.add_argument(
        "--slo-share", type=share, default=0.9, metavar="P", help="of requests that must have it (default: %(default)s)"
    )
    group.add_argument(
        "--confidence", type=share, default=0.95, metavar="P", help="of the intervals (default: %(default)s)"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, request by request")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.png, .svg, ...; takes matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Prints the tables; 1 if a request failed, 130 if it was interrupted: then they are those of the rounds before."""
    if not 0 < args.confidence < 1:
        raise OptionError(f"--confidence {args.confidence} must be between 0 and 1.")

    from hf_cb.bench.replay.plot import draw
    from hf_cb.bench.replay.report import table
    from hf_cb.bench.replay.slo import Slo
    from hf_cb.bench.replay.summary import joined, summarize
    from hf_cb.metrics.files import check_folder, check_picture, write_file

    for option in ("json", "save_trace"):
        if (path := getattr(args, option)) is not None:
            check_folder(path, f"--{option.replace('_', '-')}")
    if args.plot is not None:
        check_picture(args.plot, "--plot")
    slo = None if args.slo is None else Slo.parse(args.slo, args.slo_share)
    if args.compare is not None:
        _refuse_beside_compare(args)
        try:
            about, settings, turns = joined(*map(_saved, args.compare))
        except (KeyError, TypeError, AttributeError) as error:
            names = " or ".join(map(str, args.compare))
            raise OptionError(f"--compare: {names} is no file of hf-cb replay --json ({error!r}).") from error
    else:
        about, settings, turns = _measured(args)
    summary = summarize(about, settings, turns, slo, args.confidence)
    model = summary["model"]
    print(f"{model['class']}, {model['dtype']}, on {summary['machine']['gpu'] or summary['machine']['cpu']}")
    print(table(summary))
    if args.json is not None:
        write_file(args.json, (json.dumps(summary) + "\n").encode())
    if args.plot is not None:
        draw(summary, args.plot)
    if args.compare is None and summary["rounds"] < args.repeat:
        print(f"hf-cb replay: {summary['notes'][0]}", file=sys.stderr)
        return INTERRUPTED
    return int(any(found["counts"]["error"] for found in summary["settings"].values()))


def _measured(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """What the figures hold for, the settings in words, and the turns of all rounds that were finished."""
    from hf_cb.bench.machine import circumstances
    from hf_cb.bench.replay.calls import make_calls
    from hf_cb.bench.replay.formats import shape
    from hf_cb.bench.replay.settings import HELD, check_comparable
    from hf_cb.bench.replay.summary import described, replayed
    from hf_cb.bench.run import cut_short
    from hf_cb.metrics.files import write_file
    from hf_cb.models.plan import model_length

    settings = _settings(args)
    configs = check_comparable(settings)
    trace = _trace(args)
    model, tokenizer = models.load(args)
    first = next(iter(configs.values()))
    longest = min(model_length(model), first.max_model_len or sys.maxsize, args.max_len or sys.maxsize)
    shaped = shape(trace, args.speed, args.limit, longest)
    if args.save_trace is not None:
        write_file(args.save_trace, "".join(shaped.trace.lines()).encode())
    calls = make_calls(shaped.trace, model.get_input_embeddings().weight.shape[0], args.seed, tokenizer)
    held = {name: getattr(first, name) for name in HELD} | {"seed of prompts": args.seed}
    about = circumstances(model, args.model or "demo") | replayed(shaped, held, args.speed)

    each = shaped.trace.seconds
    print(
        f"{args.repeat} rounds of {len(configs)} settings; the arrivals alone take {duration(each)} in each, and "
        f"{duration(each * args.repeat * len(configs))} in all",
        file=sys.stderr,
        flush=True,
    )
    turns = _played(model, configs, calls, args.repeat)
    if len(turns) < args.repeat * len(configs):
        about["notes"] = [cut_short(len(turns) // len(configs), args.repeat)]
    return about, described(settings, configs), turns


def _played(model: Any, configs: Mapping[str, EngineConfig], calls: list[Any], rounds: int) -> list[Turn]:
    """Plays them, and tells of each turn; after an interrupt those of whole rounds, if there is one."""
    from hf_cb.bench.replay.play import play

    turns: list[Turn] = []

    def say(turn: Turn) -> None:
        turns.append(turn)
        said = f"round {turn.round + 1}, {turn.setting}: {turn.seconds:.1f} s, {turn.tokens / turn.seconds:.1f} tok/s"
        print(said, file=sys.stderr, flush=True)

    try:
        play(model, configs, calls, rounds, say)
    except KeyboardInterrupt:
        if len(turns) < len(configs):
            raise
        del turns[len(turns) // len(configs) * len(configs) :]  # settings are compared round by round
    return turns


def _settings(args: argparse.Namespace) -> list[Any]:
    from hf_cb.bench.replay.settings import Setting, parse_options, sweep

    base = models.engine_options(args) | parse_options(args.base)
    several = args.setting or args.a is not None or args.b is not None
    if args.sweep is not None:
        if several:
            raise OptionError("--sweep names all settings: give what they have in common by --base.")
        return sweep(args.sweep, base)
    if not several:
        raise OptionError("There is no setting to measure: give --a and --b, --sweep, or --setting.")
    given: list[tuple[str, str]] = []
    if args.a is not None or args.b is not None:
        given.append(("A", args.a or ""))
    if args.b is not None:
        given.append(("B", args.b))
    for text in args.setting:
        name, colon, options = text.partition(":")
        if not name or not colon or "=" in name:
            raise OptionError(f"--setting {text!r} must be NAME:key=value,...")
        given.append((name, options))
    return [Setting(name, base | parse_options(text)) for name, text in given]


def _trace(args: argparse.Namespace) -> Any:
    from hf_cb.bench.replay.formats import read_trace
    from hf_cb.bench.replay.generators import Lengths, generate

    if (args.trace is None) == (args.generate is None):
        raise OptionError("Give either a TRACE or --generate poisson|bursty.")
    if args.trace is not None:
        return read_trace(args.trace, args.limit)
    prompts, outputs = Lengths.parse(args.prompt_lengths), Lengths.parse(args.output_lengths)
    return generate(args.generate, args.rate, args.requests, prompts, outputs, args.seed, args.burstiness)


def _refuse_beside_compare(args: argparse.Namespace) -> None:
    for option in ("trace", "generate", "a", "b", "sweep", "save_trace"):
        if getattr(args, option) is not None:
            raise OptionError(f"--compare runs nothing, so {option.replace('_', '-')} says nothing beside it.")
    if args.setting or args.base:
        raise OptionError("--compare runs nothing, so settings say nothing beside it.")


def _saved(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"--compare {path}: {error}") from error
    if not isinstance(saved, dict) or not {"turns", "settings", "trace"} <= set(saved):
        raise OptionError(f"--compare {path} is no file of hf-cb replay --json.")
    return saved
