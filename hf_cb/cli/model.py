"""The options of every command that loads a model, and the loading."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hf_cb.cli.numbers import count
from hf_cb.config import EngineConfig
from hf_cb.errors import HfCbError, OptionError

DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, how it is loaded, and the engine's sizes."""
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", help="folder or Hub id (default: the demo model, fetched once)")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: %(default)s)")
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    group.add_argument("--device-map", help='such as "auto": over several devices; excludes --device')
    group.add_argument("--revision", help="branch, tag or commit on the Hub")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    group.add_argument("--max-model-len", type=count, metavar="N", help="tokens of prompt and output together")
    group.add_argument("--kv-budget", metavar="SIZE", help='memory for the KV cache, such as "2GiB"')
    group.add_argument("--policy", help='whose turn it is, such as "priority" or "dynamic:8:0.05" (docs/policies.md)')
    group.add_argument("--prefill-chunk", type=count, metavar="N", help="prompt tokens in a step while answers run")
    group.add_argument("--itl-target", type=float, metavar="S", help="seconds between two tokens of a running answer")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """More of the engine's options, for commands that run for long."""
    group = parser.add_argument_group("engine")
    group.add_argument("--max-num-seqs", type=count, metavar="N", help="requests in a step")
    group.add_argument("--max-batch-tokens", type=count, metavar="N", help="tokens in a step")
    group.add_argument("--num-threads", type=count, metavar="N", help="CPU threads of a step")
    group.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other field of EngineConfig (docs/options.md), its value in JSON or as text; may be repeated",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `EngineConfig` that were given."""
    names = ["max_model_len", "kv_budget", "policy", "prefill_chunk", "itl_target"]
    names += ["max_num_seqs", "max_batch_tokens", "num_threads"]  # of commands that run for long
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    for item in getattr(args, "engine", []):
        name, equals, text = item.partition("=")
        if not equals:
            raise OptionError(f"--engine {item} must be NAME=VALUE, such as prefix_caching=false.")
        if name in given:
            raise OptionError(f"--engine {item}: {name} is given twice.")
        try:
            given[name] = json.loads(text)
        except ValueError:
            given[name] = text
    return given


def served_name(model: str | None) -> str:
    """The model's name in requests and answers: a Hub id as it is, the last part of a folder."""
    if model is None:
        return "demo"
    return Path(model).resolve().name if Path(model).is_dir() else model


def loading(args: argparse.Namespace) -> dict[str, Any]:
    """Where the model is and how to load it, in values that JSON knows.

    "source"; "model" and "tokenizer", arguments of their `from_pretrained`; "device", None with a device map.

    Raises:
        OptionError: --device and --device-map together. HfCbError: the demo model cannot be fetched.
    """
    import torch

    source, dtype = args.model, args.dtype
    if source is None:
        source = _demo_model()
        dtype = "bfloat16" if dtype == "auto" else dtype  # as it was published; the folder has it in float32
    both: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if args.revision is not None:
        both["revision"] = args.revision
    # with sdpa, transformers' own batching works too, and hf_cb does not care
    model = both | {"dtype": dtype, "attn_implementation": "sdpa"}
    device = args.device
    if args.device_map is not None:
        if device is not None:
            raise OptionError("--device and --device-map both say where the model goes: give one.")
        model["device_map"] = args.device_map
    elif device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"source": source, "model": model, "tokenizer": both, "device": device}


def _demo_model() -> str:
    from hf_cb.demo import demo_model_path

    try:
        return str(demo_model_path())
    except RuntimeError as error:
        raise HfCbError(str(error)) from error


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model, in eval mode, and its tokenizer.

    Raises:
        OptionError: there is no such model, or it cannot be loaded like that; the message says why.
    """
    EngineConfig.of(None, **engine_options(args))  # refused now, not after minutes of loading
    how = loading(args)
    source = Path(how["source"])
    if not source.exists() and (source.is_absolute() or source.parts[0] in (".", "..", "~")):
        raise OptionError(f"--model {source} is no folder; a model on the Hub is named OWNER/NAME.")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # of loading weights: noise in a log
    try:
        tokenizer = AutoTokenizer.from_pretrained(how["source"], **how["tokenizer"])
        model = AutoModelForCausalLM.from_pretrained(how["source"], **how["model"]).eval()
        if how["device"] is not None:
            model.to(how["device"])
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"--model {how['source']} cannot be loaded: {reason}") from error
    return model, tokenizer
