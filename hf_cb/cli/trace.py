"""Run prompts and show what the engine did: a trace for Perfetto, a picture, and where each request's time went."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_cb.cli import model as models
from hf_cb.cli.numbers import count, not_negative
from hf_cb.errors import OptionError
from hf_cb.values import is_number

RING = 1 << 17  # steps: enough for a run that somebody waits for
MANY = 32  # requests up to which each is explained


@dataclass(frozen=True)
class Job:
    """A prompt (text, chat or ids), how many tokens are wanted, and when it comes, in seconds after the start."""

    prompt: Any
    max_new_tokens: int
    arrival: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help='one JSON object a line: "prompt" (text, chat or token ids), and as you like "max_new_tokens" and '
        '"arrival" in seconds (default: some of many lengths from a text that comes with hf_cb)',
    )
    group.add_argument("--requests", type=count, default=14, metavar="N", help="without --prompts (%(default)s)")
    group.add_argument("--rate", type=not_negative, default=4.0, metavar="R", help="of those, a second; 0: all at once")
    group.add_argument("--max-new-tokens", type=count, default=48, metavar="N", help="at most (%(default)s)")
    group = parser.add_argument_group("engine")
    for name in ("max-num-seqs", "max-batch-tokens", "block-size", "num-blocks"):
        group.add_argument(f"--{name}", type=count, metavar="N", help=f"as {name.replace('-', '_')} of EngineConfig")
    group = parser.add_argument_group("output")
    group.add_argument("-o", "--out", default="trace.json", metavar="FILE", help="for Perfetto (default: %(default)s)")
    group.add_argument("--plot", metavar="FILE", help="the picture (default: trace.png, if matplotlib is installed)")
    group.add_argument("--by", choices=("time", "steps"), default="time", help="the picture's axis (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Writes the files and prints `handle.why()` of each request; 1 if one of them failed."""
    out, plot = Path(args.out), _plot(args)
    from hf_cb.metrics.files import check_folder, check_picture
    from hf_cb.metrics.perfetto import write_perfetto
    from hf_cb.metrics.timeline import plot_timeline

    check_folder(out, "--out")
    if plot is not None:
        check_picture(plot, "--plot")
    jobs = _read_jobs(Path(args.prompts), args.max_new_tokens) if args.prompts else None
    model, tokenizer = models.load(args)
    if jobs is None:
        jobs = _mixed_jobs(args, tokenizer)
    records, said, failed = _run(model, tokenizer, jobs, _options(args))
    for line in said[:MANY]:
        print(line)
    write_perfetto(records, out)
    print(f"{len(records)} steps in {out}: open it in https://ui.perfetto.dev")
    if plot is not None:
        plot_timeline(records, plot, by=args.by)
        print(f"and as a picture in {plot}")
    return int(failed)


def _plot(args: argparse.Namespace) -> Path | None:
    if args.plot is not None:
        return Path(args.plot)
    return Path("trace.png") if importlib.util.find_spec("matplotlib") else None


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_num_seqs", "max_batch_tokens", "block_size", "num_blocks")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return models.engine_options(args) | given | {"trace_steps": RING}


def _read_jobs(path: Path, max_new_tokens: int) -> list[Job]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--prompts {path} cannot be read: {error}") from error
    jobs = [
        _job(line, f"--prompts {path}, line {i}", max_new_tokens) for i, line in enumerate(lines, 1) if line.strip()
    ]
    if not jobs:
        raise OptionError(f"--prompts {path}: there are no prompts in it.")
    return sorted(jobs, key=lambda job: job.arrival)


def _job(line: str, where: str, max_new_tokens: int) -> Job:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{where}: this is no JSON: {error}") from error
    if not isinstance(given, dict) or "prompt" not in given:
        raise OptionError(f'{where}: an object with a "prompt" is wanted, not {line[:60]!r}.')
    length, arrival = given.get("max_new_tokens", max_new_tokens), given.get("arrival", 0.0)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise OptionError(f"{where}: max_new_tokens must be a whole number from 1 up, not {length!r}.")
    if not is_number(arrival) or not 0 <= arrival < float("inf"):
        raise OptionError(f"{where}: arrival must be a number of seconds from 0 up, not {arrival!r}.")
    return Job(given["prompt"], length, arrival)


def _mixed_jobs(args: argparse.Namespace, tokenizer: Any) -> list[Job]:
    from hf_cb.bench.workload import mixed, poisson

    shortest = max(1, args.max_new_tokens // 4)
    load = mixed(tokenizer, args.requests, 0, 70, shortest, args.max_new_tokens, args.max_model_len)
    if args.rate:
        load = poisson(load, args.rate)
    return [Job(r.prompt, r.max_new, r.arrival) for r in load.requests]


def _run(model: Any, tokenizer: Any, jobs: list[Job], options: dict[str, Any]) -> tuple[list[Any], list[str], bool]:
    """The steps, a line about each request, and whether one failed."""
    from hf_cb.patching import accelerate, restore

    accelerate(model, tokenizer, **options)
    try:
        with model.continuous_batching_context_manager() as manager:
            began, handles = time.perf_counter(), []
            for job in jobs:
                time.sleep(max(0.0, job.arrival - (time.perf_counter() - began)))
                sampling = {"max_new_tokens": job.max_new_tokens, "do_sample": False, "eos_token_id": -1}
                handles.append(manager.submit(job.prompt, **sampling))
            outputs = [handle.outputs()[0] for handle in handles]
            return manager.trace(), [handle.why() for handle in handles], any(o.error for o in outputs)
    finally:
        restore(model)
