"""`hf-cb generate --input --output`: a job that may be killed at any moment, and goes on when it is run again."""

from __future__ import annotations

import argparse
import hashlib
import json
import queue
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hf_cb.cli import model as models
from hf_cb.cli.job_lines import Line, read_lines
from hf_cb.cli.job_output import JobOutput, open_output
from hf_cb.errors import ManagerStoppedError, OptionError

if TYPE_CHECKING:
    from hf_cb.cli.job_answers import Answerer, Work
    from hf_cb.manager.manager import ContinuousBatchingManager

SOME_FAILED, DIED, INTERRUPTED, TERMINATED = 1, 3, 130, 143
AHEAD = 2  # requests in hand, as a multiple of those in a step


def run_job(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Answers every line that has no answer yet; the exit code.

    Args:
        options: generation options for lines that do not say them.
    """
    source, target = Path(args.input), Path(args.output)
    if not source.is_file():
        raise OptionError(f"--input {source} is not a file.")
    if target.exists() and target.samefile(source):
        raise OptionError("--input and --output are the same file.")
    with open_output(target, _settings(args, options), args.restart) as output:
        if args.retry_failed:
            output.forget_failed()
        total = _count_and_compare(source, output)
        try:
            with _terminable():
                if output.done < total:
                    _generate(args, options, source, output, total)
                output.finish()
        except KeyboardInterrupt as stop:
            _tell_rest(output, total, "interrupted")
            return TERMINATED if stop.args == (signal.SIGTERM,) else INTERRUPTED
        except ManagerStoppedError as error:
            print(f"hf-cb generate: {error}", file=sys.stderr)
            _tell_rest(output, total, "stopped")
            return DIED
        if output.failed:
            print(f'hf-cb generate: {output.failed} of {total} lines failed: see their "error"', file=sys.stderr)
        return SOME_FAILED if output.failed else 0


def _settings(args: argparse.Namespace, options: dict[str, Any]) -> str:
    """A digest of everything but the lines that answers depend on."""
    names = ("model", "dtype", "revision", "chat", "system", "seed", "max_model_len", "token_ids")
    said = {name: getattr(args, name) for name in names} | {"options": options}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:8]


def _count_and_compare(source: Path, output: JobOutput) -> int:
    """How many lines there are; OptionError if those that are answered were others."""
    total = 0
    for line in read_lines(source):
        total += 1
        if line.index in output and line.digest() != output.digest(line.index):
            raise OptionError(
                f"{source} has changed: its line {line.number} is not the one that {output.path} has an answer to. "
                f"Give another --output, or --restart to begin anew."
            )
    if output.highest >= total:
        raise OptionError(
            f"{source} has changed: it has {total} lines, and {output.path} has an answer to line "
            f"{output.highest + 1}. Give another --output, or --restart to begin anew."
        )
    return total


def _tell_rest(output: JobOutput, total: int, how: str) -> None:
    output.sync()
    more = "the same command goes on from there"
    print(f"hf-cb generate: {how}; {output.done} of {total} lines are done, and {more}", file=sys.stderr)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is an interrupt too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _generate(args: argparse.Namespace, options: dict[str, Any], source: Path, output: JobOutput, total: int) -> None:
    model, tokenizer = models.load(args)
    from tqdm.auto import tqdm

    from hf_cb.cli.job_answers import Answerer
    from hf_cb.patching import accelerate, restore

    accelerate(model, tokenizer, **models.engine_options(args))
    try:
        shown = args.progress or sys.stderr.isatty()
        with (
            model.continuous_batching_context_manager() as manager,
            tqdm(total=total, initial=output.done, unit="line", disable=not shown) as bar,
        ):
            answerer = Answerer(manager, tokenizer, args, options)
            lines = (line for line in read_lines(source) if line.index not in output)
            with closing(_answers(manager, answerer, lines)) as answers:
                for line, record in answers:
                    output.add(line.index, line.digest(), record)
                    speed = manager.stats().tokens / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{speed:.0f} tok/s", refresh=False)
                    bar.update(1)
    finally:
        restore(model)


def _answers(
    manager: ContinuousBatchingManager, answerer: Answerer, lines: Iterator[Line]
) -> Generator[tuple[Line, dict[str, Any]]]:
    """Each line with its record, as they are done. No more lines are read than are worked on, so there may be any
    number."""
    limit = AHEAD * manager.engine.config.max_num_seqs
    live: dict[int, Work] = {}
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        while True:
            while len(live) < limit and (line := next(lines, None)) is not None:
                work = live[line.index] = answerer.start(line)
                work.tell_when_done(partial(done.put, line.index))
            if not live:
                return
            ended = live.pop(done.get(), None)
            if ended is not None:
                record = ended.record()
                if manager.loop.fatal_error is not None:
                    manager.loop.refuse_if_stopped()  # not this line's fault: it is answered by the next run
                yield ended.line, record
    finally:
        for work in live.values():
            work.cancel()
