"""Serve a model over HTTP, as OpenAI's API: chat, completions, streaming, tools, metrics.

docs/server.md says what requests may hold. exit codes: 0 after SIGTERM or Ctrl-C; 2 refused.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from hf_cb.cli import model as models
from hf_cb.cli.numbers import count, count_or_zero, positive
from hf_cb.config import parse_bytes
from hf_cb.errors import OptionError, missing

KEY_VARIABLE = "HF_CB_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="the same as --model")
    models.add_arguments(parser)
    models.add_engine_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="0.0.0.0: reachable from elsewhere (default: %(default)s)")
    group.add_argument("--port", type=count_or_zero, default=8000, help="0: any free one (default: %(default)s)")
    group.add_argument(
        "--api-key", metavar="KEY", help=f"asked for under /v1 (default: what the variable {KEY_VARIABLE} holds)"
    )
    group.add_argument("--served-model-name", metavar="NAME", help="in requests and answers (default: the model's)")
    group.add_argument(
        "--max-queue-size",
        type=count_or_zero,
        default=512,
        metavar="N",
        help="waiting requests beyond which there is a 429; 0: no limit (default: %(default)s)",
    )
    group.add_argument(
        "--max-requests",
        type=count,
        default=2048,
        metavar="N",
        help="HTTP requests at once beyond which there is a 429 (default: %(default)s)",
    )
    group.add_argument("--max-output-tokens", type=count, metavar="N", help="most that a request may ask for")
    group.add_argument(
        "--max-body-size", default="16MiB", metavar="SIZE", help="of a request, else 413 (default: %(default)s)"
    )
    group.add_argument(
        "--request-timeout", type=positive, metavar="S", help="seconds after which a request ends with an error"
    )
    group.add_argument(
        "--shutdown-timeout",
        type=positive,
        default=30.0,
        metavar="S",
        help="seconds for what runs, after SIGTERM or Ctrl-C (default: %(default)g)",
    )
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; 0 after either."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise OptionError(missing("The server", "serve", error)) from error
    if args.folder is not None and args.model is not None:
        raise OptionError("MODEL and --model name the same thing: give one.")
    args.model = args.folder if args.model is None else args.model
    body_limit = parse_bytes(args.max_body_size, "--max-body-size")
    options = models.engine_options(args) | {"max_queue_size": args.max_queue_size}
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from hf_cb.serving.server import listen

    listen(args.host, args.port).close()  # a port that is taken is said now, not after minutes of loading
    model, tokenizer = models.load(args)
    from hf_cb.patching import accelerate, restore
    from hf_cb.serving.limits import ServerConfig
    from hf_cb.serving.server import serve
    from hf_cb.serving.service import Service

    config = ServerConfig(
        name=args.served_model_name or models.served_name(args.model),
        api_key=args.api_key or os.environ.get(KEY_VARIABLE) or None,
        max_body_bytes=body_limit,
        max_requests=args.max_requests,
        max_output_tokens=args.max_output_tokens,
        request_timeout=args.request_timeout,
        shutdown_timeout=args.shutdown_timeout,
    )
    accelerate(model, tokenizer, **options)
    try:
        manager = model.init_continuous_batching()
        manager.start()
        try:
            serve(Service(manager, tokenizer, config), args.host, args.port, lambda url: _ready(url, config.name))
        finally:
            manager.stop(hard_stop=True)
    finally:
        restore(model)
    return 0


def _ready(url: str, name: str) -> None:
    print(f"hf-cb serve: {name} at {url}/v1", file=sys.stderr, flush=True)
