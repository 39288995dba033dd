"""Run transformers' own command with hf_cb in place of its continuous batching, such as `serve --continuous-batching`.

usage: hf-cb transformers serve FOLDER --continuous-batching
"""

from __future__ import annotations

import argparse
import sys

from hf_cb.errors import OptionError, missing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="as for the command `transformers`")


def run(args: argparse.Namespace) -> int:
    try:
        from transformers.cli.transformers import main
    except ImportError as error:
        raise OptionError(missing("The command transformers", "serve", error)) from error

    from hf_cb.patching import patch, unpatch

    patch()
    before, sys.argv = sys.argv, ["transformers", *args.arguments]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0) if not isinstance(stop.code, str) else 1
    finally:
        sys.argv = before
        unpatch()
    return 0
