"""Measure hf_cb against generate, transformers' own continuous batching, vLLM, OpenVINO and llama.cpp."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_cb.cli import model as models
from hf_cb.cli.job import INTERRUPTED
from hf_cb.cli.numbers import count, count_or_zero
from hf_cb.errors import OptionError

if TYPE_CHECKING:
    from hf_cb.bench.measured import Measured
    from hf_cb.bench.run import BenchResult

WORKLOADS = ("mixed", "single", "long", "short", "shared", "poisson")
HERE = ("hf_cb", "generate", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    parser.set_defaults(dtype="bfloat16")
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--engines",
        metavar="A,B",
        help=f"of {', '.join(HERE)}, and those with --env (default: all of these)",
    )
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="PEER=PYTHON",
        help="the Python of an environment that has vllm, openvino or llamacpp; may be repeated",
    )
    group.add_argument(
        "--peer-model",
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="the model in the peer's own form (a GGUF file, an OpenVINO export); made and kept unless given",
    )
    group.add_argument(
        "--restart-peers",
        action="store_true",
        help="start each peer for its turn only, where memory does not hold all of them",
    )
    group.add_argument(
        "--workload",
        choices=WORKLOADS,
        default="mixed",
        help="mixed lengths, a single request, long prompts with short answers, short prompts with long answers, a "
        "shared beginning, or mixed with arrivals over time (default: %(default)s)",
    )
    group.add_argument(
        "--requests", type=count, metavar="N", help="not of single (default: 64, and 16 for long and short)"
    )
    group.add_argument("--max-requests", type=count, default=64, metavar="N", help="at a time (default: %(default)s)")
    group.add_argument("--rate", type=float, default=2.0, metavar="R", help="arrivals a second (default: %(default)s)")
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="in all engines that can (default: only for shared)",
    )
    group.add_argument("--seed", type=count_or_zero, default=0, metavar="N", help="of mixed (default: %(default)s)")
    group.add_argument(
        "--prompt-mean",
        type=count,
        default=128,
        metavar="N",
        help="centre of prompt lengths of mixed and poisson (default: %(default)s)",
    )
    group.add_argument(
        "--out-min",
        type=count,
        default=16,
        metavar="N",
        help="shortest output of mixed and poisson (default: %(default)s)",
    )
    group.add_argument(
        "--out-max",
        type=count,
        metavar="N",
        help="longest output of mixed and poisson, the output of single (default: 256, and 128 for single)",
    )
    group.add_argument("--repeat", type=count, default=1, metavar="N", help="rounds (default: %(default)s)")
    group.add_argument(
        "--first-token",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time import to first token, in a fresh process that loads the model again (default: yes)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.png, .svg, ...; takes matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Prints the table; 1 if an engine failed or made other tokens than ordered, 130 if it was interrupted: then the
    table is that of the rounds before."""
    from hf_cb.bench.report import table
    from hf_cb.metrics.files import check_folder, check_picture, write_file

    if args.json is not None:
        check_folder(args.json, "--json")
    if args.plot is not None:
        from hf_cb.bench.plot import draw

        check_picture(args.plot, "--plot")
    summary, interrupted = _measured(args)
    print(f"{summary['model']['class']}, {summary['model']['dtype']}, on {summary['machine']['cpu']}")
    print(table(summary))
    if args.json is not None:
        write_file(args.json, (json.dumps(summary, indent=2) + "\n").encode())
    if args.plot is not None:
        draw(summary, args.plot)
    if interrupted is not None:
        print(f"hf-cb bench: {interrupted}", file=sys.stderr)
        return INTERRUPTED
    return int(bool(summary["problems"]))


def _measured(args: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """All figures, and after which round they were interrupted, if so."""
    from hf_cb.bench import speeds
    from hf_cb.bench.engines import NAMES, HfCb, make_engines
    from hf_cb.bench.floor import least_time, model_cost
    from hf_cb.bench.machine import circumstances
    from hf_cb.bench.peer import PEERS
    from hf_cb.bench.report import summarize

    pythons, given = _pairs("--env", args.env, PEERS), _pairs("--peer-model", args.peer_model, PEERS)
    names = _names(args.engines or ",".join((*HERE, *pythons)), NAMES, pythons)
    options = _engine_options(args)
    model, tokenizer = models.load(args)
    workload = _workload(args, model, tokenizer)
    engines = make_engines(names, model, _peers(args, model, workload, pythons, given), **options)
    cost, seen = model_cost(model), [speeds.measure(model)]
    result = _run(engines, workload, args.repeat)
    seen.append(speeds.measure(model))  # at the end once more: a machine's speed is not steady
    floor = least_time(cost, workload, speeds.best_of(seen), args.max_requests, options["prefix_caching"])
    summary = summarize(result, floor, seen)
    if args.first_token and HfCb.name in names and result.interrupted is None:
        from hf_cb.bench.first_token import time_first_token

        summary["first_token"] = time_first_token(models.loading(args), workload.requests[0].prompt, options)
    arguments = {"seed": args.seed, "repeat": args.repeat} | options
    return circumstances(model, args.model or "demo") | {"arguments": arguments} | summary, result.interrupted


def _run(engines: Sequence[Any], workload: Any, repeat: int) -> BenchResult:
    """All rounds, with a word on each run; peers' processes have ended then."""
    from hf_cb.bench.peer import Peer
    from hf_cb.bench.run import run_engines

    def say(measured: Measured) -> None:
        print(f"{measured.engine}: {measured.tok_s:.1f} tok/s", file=sys.stderr, flush=True)

    try:
        return run_engines(engines, workload, repeat, say)
    finally:
        for engine in engines:
            if isinstance(engine, Peer):
                engine.close()


def _names(text: str, known: Sequence[str], pythons: Mapping[str, str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names) or not set(names) <= set(known):
        raise OptionError(f"--engines {text!r} must be some of {', '.join(known)}, each once, with commas.")
    for name in names:
        if name not in HERE and name not in pythons:
            raise OptionError(f"--engines: {name} has a Python of its own; say which by --env {name}=PYTHON.")
    return names


def _pairs(option: str, texts: Sequence[str], peers: Sequence[str]) -> dict[str, str]:
    """PEER=PATH, checked."""
    pairs = {}
    for text in texts:
        name, _, path = text.partition("=")
        if name not in peers or not path:
            raise OptionError(f"{option} {text!r} must be PEER=PATH, with a peer of {', '.join(peers)}.")
        if not Path(path).exists():
            raise OptionError(f"{option} {text}: there is no such file.")
        pairs[name] = str(Path(path).absolute())
    return pairs


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    caching = args.workload == "shared" if args.prefix_caching is None else args.prefix_caching
    return models.engine_options(args) | {"max_num_seqs": args.max_requests, "prefix_caching": caching}


def _peers(
    args: argparse.Namespace, model: Any, workload: Any, pythons: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, Any]:
    from hf_cb.bench.peer import Peer
    from hf_cb.bench.peer_jobs import job_maker

    options = _engine_options(args)

    def maker(name: str) -> Callable[[], Peer]:
        job = job_maker(
            name,
            pythons[name],
            model,
            models.loading(args)["source"],
            workload,
            max_seqs=args.max_requests,
            prefix_caching=options["prefix_caching"],
            given=given.get(name),
            revision=args.revision,
        )
        return lambda: Peer(name, pythons[name], job, restart=args.restart_peers)

    return {name: maker(name) for name in pythons}


def _workload(args: argparse.Namespace, model: Any, tokenizer: Any) -> Any:
    from hf_cb.bench import workload
    from hf_cb.models.plan import model_length

    max_len = min(model_length(model), args.max_model_len or sys.maxsize)
    if args.workload == "single":
        return workload.single(tokenizer, args.prompt_mean, args.out_max or 128, max_len)
    if args.workload == "long":
        return workload.long_prompts(tokenizer, args.requests or 16, max_len)
    if args.workload == "short":
        return workload.long_answers(tokenizer, args.requests or 16, max_len)
    if args.workload == "shared":
        return workload.shared(tokenizer, args.requests or 64, max_len=max_len)
    mixed = workload.mixed(
        tokenizer,
        n=args.requests or 64,
        seed=args.seed,
        prompt_mean=args.prompt_mean,
        out_min=args.out_min,
        out_max=args.out_max or 256,
        max_len=max_len,
    )
    return workload.poisson(mixed, args.rate, args.seed) if args.workload == "poisson" else mixed
