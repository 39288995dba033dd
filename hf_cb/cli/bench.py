"""Measure hf_cb against generate and against transformers' own continuous batching."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hf_cb.cli import model as models
from hf_cb.cli.numbers import count, count_or_zero
from hf_cb.errors import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    parser.set_defaults(dtype="bfloat16")
    group = parser.add_argument_group("benchmark")
    group.add_argument("--engines", default="hf_cb,generate,transformers", metavar="A,B", help="(default: %(default)s)")
    group.add_argument(
        "--workload",
        choices=("mixed", "single"),
        default="mixed",
        help="many requests or one (default: %(default)s)",
    )
    group.add_argument("--requests", type=count, default=64, metavar="N", help="of mixed (default: %(default)s)")
    group.add_argument("--seed", type=count_or_zero, default=0, metavar="N", help="of mixed (default: %(default)s)")
    group.add_argument(
        "--prompt-mean",
        type=count,
        default=128,
        metavar="N",
        help="centre of prompt lengths (default: %(default)s)",
    )
    group.add_argument(
        "--out-min",
        type=count,
        default=16,
        metavar="N",
        help="shortest output of mixed (default: %(default)s)",
    )
    group.add_argument(
        "--out-max",
        type=count,
        metavar="N",
        help="longest output of mixed, the output of single (default: 256, and 128 for single)",
    )
    group.add_argument("--repeat", type=count, default=1, metavar="N", help="rounds (default: %(default)s)")
    group.add_argument(
        "--first-token",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time import to first token, in a fresh process that loads the model again (default: yes)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def run(args: argparse.Namespace) -> int:
    """Prints the table; 1 if an engine failed or made other tokens than ordered."""
    if args.json is not None and not args.json.parent.is_dir():
        raise OptionError(f"--json {args.json}: there is no such folder.")  # better now than after the work

    from hf_cb.bench.engines import NAMES, HfCb, Measured, make_engines
    from hf_cb.bench.report import summarize, table
    from hf_cb.bench.run import run_engines

    names, options = _names(args.engines, NAMES), models.engine_options(args)
    model, tokenizer = models.load(args)
    engines = make_engines(names, model, **options)
    workload = _workload(args, model, tokenizer)

    def say(measured: Measured) -> None:
        print(f"{measured.engine}: {measured.tok_s:.1f} tok/s", file=sys.stderr, flush=True)

    summary = summarize(run_engines(engines, workload, args.repeat, say))
    if args.first_token and HfCb.name in names:
        from hf_cb.bench.first_token import time_first_token

        summary["first_token"] = time_first_token(models.loading(args), workload.requests[0].prompt, options)
    summary = _circumstances(args, model) | summary
    print(f"{summary['model']['class']}, {summary['model']['dtype']}, on {summary['machine']['cpu']}")
    print(table(summary))
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return int(bool(summary["problems"]))


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names) or not set(names) <= set(known):
        raise OptionError(f"--engines {text!r} must be some of {', '.join(known)}, each once, with commas.")
    return names


def _workload(args: argparse.Namespace, model: Any, tokenizer: Any) -> Any:
    from hf_cb.bench import workload
    from hf_cb.models.plan import model_length

    max_len = min(model_length(model), args.max_model_len or sys.maxsize)
    if args.workload == "single":
        return workload.single(tokenizer, args.prompt_mean, args.out_max or 128, max_len)
    return workload.mixed(
        tokenizer,
        n=args.requests,
        seed=args.seed,
        prompt_mean=args.prompt_mean,
        out_min=args.out_min,
        out_max=args.out_max or 256,
        max_len=max_len,
    )


def _circumstances(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """What the figures hold for: without it they mean nothing."""
    from hf_cb.bench.machine import machine, versions

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "model": {
            "name": args.model or "demo",
            "class": type(model).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        "arguments": {"seed": args.seed, "repeat": args.repeat} | models.engine_options(args),
    }
