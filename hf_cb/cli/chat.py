"""Chat with a model in the browser, several people at once."""

from __future__ import annotations

import argparse

from hf_cb.cli import model as models
from hf_cb.cli.numbers import count_or_zero
from hf_cb.errors import OptionError, missing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    group = parser.add_argument_group("page")
    group.add_argument("--host", default="127.0.0.1", help="0.0.0.0: for the whole network (default: %(default)s)")
    group.add_argument("--port", type=count_or_zero, default=7860, help="0: any that is free (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Serves the page until it is interrupted."""
    try:
        from hf_cb.chat.app import appearance, build_app
    except ImportError as error:
        raise OptionError(missing("The chat", "chat", error)) from error
    model, tokenizer = models.load(args)
    if not getattr(tokenizer, "chat_template", None):
        raise OptionError("A chat needs a chat template, and this model's tokenizer has none: try `hf-cb generate`.")
    from hf_cb.patching import accelerate, restore

    accelerate(model, tokenizer, **models.engine_options(args))
    name = str(args.model or "SmolLM2-135M-Instruct")
    try:
        with model.continuous_batching_context_manager() as manager:
            port = {"server_port": args.port} if args.port else {}
            build_app(manager, name).launch(server_name=args.host, **port, **appearance())
    finally:
        restore(model)
    return 0
