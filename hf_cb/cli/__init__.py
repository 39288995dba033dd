"""The command line: `hf-cb COMMAND`, one file a command.

A command has `add_arguments(parser)` and `run(args)`, which returns the exit code. torch and transformers are
imported in `run` alone, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_cb.cli import bench, chat, doctor, generate, plan, replay, serve, simulate, trace, transformers_cli
from hf_cb.errors import HfCbError

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "bench": bench,
    "replay": replay,
    "trace": trace,
    "plan": plan,
    "simulate": simulate,
    "doctor": doctor,
    "transformers": transformers_cli,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0: done; 1: done, and something in it failed; 2: wrong arguments, or something that hf_cb refuses, in one
    line on stderr; 130: interrupted. Any other exception is a bug and is raised.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said all there is to say
        return int(stop.code or 0)
    try:
        return int(args.run(args))
    except HfCbError as error:
        print(f"hf-cb {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hf-cb {args.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-cb", description="Continuous batching for Hugging Face models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary, _, more = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=more.strip() or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
