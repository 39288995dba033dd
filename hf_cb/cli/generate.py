"""Generate for prompts from arguments, from standard input, or from a file with a line for each.

With --input and --output it is a job: each answer is appended as it is done, and a job that was interrupted or killed
goes on where it stopped when the same command is run again. docs/jobs.md says what a line may hold.

exit codes: 0 done; 1 done, and some failed; 2 refused; 3 the generation died, run it again; 130 interrupted; 143 told
to end (SIGTERM).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from typing import Any

from hf_cb.cli import model as models
from hf_cb.cli.numbers import count, count_or_zero, not_negative, share
from hf_cb.errors import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    models.add_engine_arguments(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; may be repeated (default: each line of standard input that is not blank)",
    )
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="prompts are a user's messages (default: if the tokenizer has a chat template)",
    )
    group.add_argument("--system", metavar="TEXT", help="system message of every chat")
    group = parser.add_argument_group("generation")
    group.add_argument("--max-new-tokens", type=count, default=256, metavar="N", help="(default: %(default)s)")
    group.add_argument("--temperature", type=not_negative, metavar="T", help="0: greedy (default: the model's)")
    group.add_argument("--top-p", type=share, metavar="P", help="sample from the likeliest of this mass")
    group.add_argument("--top-k", type=count_or_zero, metavar="K", help="sample from the K likeliest; 0: from all")
    group.add_argument(
        "--seed", type=count_or_zero, metavar="N", help="makes sampling repeatable (lines of a file: 0 by default)"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object a line for each prompt")
    group.add_argument(
        "--progress",
        action="store_true",
        help="a progress bar on standard error (a job shows one on a terminal anyway)",
    )
    group = parser.add_argument_group("job")
    group.add_argument("--input", metavar="FILE", help='lines of JSON with a "prompt", "messages" or "prompt_ids"')
    group.add_argument("--output", metavar="FILE", help="where the answers go, in the order of the input at the end")
    group.add_argument("--retry-failed", action="store_true", help="try lines again whose answer is an error")
    group.add_argument("--restart", action="store_true", help="begin anew, whatever is in --output")
    group.add_argument("--token-ids", action="store_true", help="put the token ids into the answers too")


def run(args: argparse.Namespace) -> int:
    """Prints the results in the order of the prompts; 1 if one of them failed."""
    options = _generation_options(args)
    if args.input is not None or args.output is not None:
        return _run_job(args, options)
    prompts = args.prompt or _read_prompts()
    if not prompts:
        raise OptionError("There are no prompts: give --prompt, or one on each line of standard input.")
    model, tokenizer = models.load(args)
    inputs = _inputs(prompts, args, tokenizer)
    import torch

    from hf_cb.patching import accelerate, restore

    accelerate(model, tokenizer, **models.engine_options(args))
    try:
        if args.seed is not None:
            torch.manual_seed(args.seed)  # each request draws its own seed from it
        results = list(model.generate_batch(inputs, progress_bar=args.progress, **options).values())
    finally:
        restore(model)
    for result, prompt in zip(results, prompts, strict=True):
        if args.json:
            print(json.dumps(_as_dict(result), ensure_ascii=False), flush=True)
        else:
            _print_text(result, prompt, several=len(prompts) > 1)
    return int(any(result.error is not None for result in results))


def _run_job(args: argparse.Namespace, options: dict[str, Any]) -> int:
    if args.input is None or args.output is None:
        raise OptionError("--input and --output belong together: give both.")
    if args.prompt or args.json:
        raise OptionError("--prompt and --json are for prompts that are not in a file: leave them out.")
    from hf_cb.cli.job import run_job

    return run_job(args, options)


def _read_prompts() -> list[str]:
    if sys.stdin.isatty():
        print("hf-cb generate: one prompt a line, please; Ctrl-D ends them.", file=sys.stderr)
    return [line.rstrip("\r\n") for line in sys.stdin if line.strip()]


def _generation_options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens}
    narrowed = {name: value for name in ("top_p", "top_k") if (value := getattr(args, name)) is not None}
    if args.temperature == 0:
        if narrowed:
            raise OptionError("--temperature 0 is greedy, and --top-p and --top-k are for sampling: leave one out.")
        options["do_sample"] = False
    elif args.temperature is not None or narrowed:
        options |= narrowed | {"do_sample": True}
        if args.temperature is not None:
            options["temperature"] = args.temperature
    if args.stop:
        options["stop_strings"] = args.stop
    return options


def _inputs(prompts: list[str], args: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """The prompts as chats, or as they are."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if args.chat and not has_template:
        raise OptionError("--chat needs a chat template, and this model's tokenizer has none: use --no-chat.")
    as_chat = has_template if args.chat is None else args.chat
    if not as_chat:
        if args.system is not None:
            raise OptionError("--system is for chats, and these prompts are plain text: leave it out.")
        return list(prompts)
    before = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [[*before, {"role": "user", "content": prompt}] for prompt in prompts]


def _as_dict(result: Any) -> dict[str, Any]:
    metrics = dataclasses.asdict(result.metrics)
    return {
        "index": result.index,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "metrics": {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in metrics.items()},
        "error": result.error,
    }


def _print_text(result: Any, prompt: str, several: bool) -> None:
    """Only the text if there is one prompt; else under a line that says which prompt it answers."""
    if several:
        shown = prompt if len(prompt) <= 60 else prompt[:57] + "..."
        print(f"--- {result.index}: {shown}", flush=True)
    if result.error is None:
        print(result.text, flush=True)
    else:
        print(f"hf-cb generate: prompt {result.index} failed: {result.error}", file=sys.stderr, flush=True)
