"""Say what a model will take and give on this machine, from its config alone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from hf_cb.cli import model as models
from hf_cb.cli.numbers import count
from hf_cb.config import EngineConfig, parse_bytes
from hf_cb.errors import OptionError
from hf_cb.words import duration

if TYPE_CHECKING:
    from hf_cb.bench.forecast import Forecast, GroupNeed, Steps
    from hf_cb.bench.speeds import Speeds

GIB, MIB = 2**30, 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder or Hub id (default: the demo model)")
    parser.add_argument("--dtype", choices=models.DTYPES, default="auto", help="of the weights (default: the config's)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    group = parser.add_argument_group("requests, all at once and all alike")
    group.add_argument("--prompt", type=count, default=512, metavar="N", help="tokens of a prompt (%(default)s)")
    group.add_argument("--output", type=count, default=128, metavar="N", help="tokens of an answer (%(default)s)")
    group.add_argument("--requests", type=count, default=64, metavar="N", help="how many (%(default)s)")
    group = parser.add_argument_group("engine")
    group.add_argument("--memory", metavar="SIZE", help='free memory to plan for, such as "80GiB" (default: what is)')
    group.add_argument("--kv-budget", metavar="SIZE", help='memory for the KV cache, such as "2GiB"')
    group.add_argument("--kv-dtype", choices=("int8", "fp8"), help="quantise the KV cache")
    for name in ("max-model-len", "max-num-seqs", "max-batch-tokens", "block-size"):
        group.add_argument(f"--{name}", type=count, metavar="N", help=f"as {name.replace('-', '_')} of EngineConfig")
    parser.add_argument("--no-speed", action="store_true", help="do not measure this machine: no step times")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; nothing is loaded, and nothing allocated but what the measurement takes."""
    names = ("kv_budget", "kv_dtype", "max_model_len", "max_num_seqs", "max_batch_tokens", "block_size")
    options = EngineConfig(**{name: value for name in names if (value := getattr(args, name)) is not None})
    memory = parse_bytes(args.memory, "--memory") if args.memory else None
    import torch

    from hf_cb.attention import interception
    from hf_cb.bench.forecast import Load, expect, forecast, room_for
    from hf_cb.bench.others import OtherWork, disturbed
    from hf_cb.bench.speeds import measure
    from hf_cb.models.outline import outline
    from hf_cb.models.plan import free_memory

    how = models.loading(argparse.Namespace(**vars(args) | {"device_map": None}))
    try:
        device = torch.device(how["device"])
        free = memory or free_memory(device)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"--device {args.device} cannot be used: {error}") from error
    model = outline(how["source"], how["model"]["dtype"], **how["tokenizer"])
    with interception.installed():
        found = forecast(model, options, Load(args.prompt, args.output, args.requests), room_for(model, device, free))
    others = OtherWork()
    speeds = None if args.no_speed else measure(model, device)
    busy = disturbed(others.cores())
    for line in _lines(type(model).__name__, found, free, device.type):
        print(line)
    if speeds is not None:
        for line in _speed_lines(expect(found, speeds), speeds, found):
            print(line)
        if busy is not None:
            print(f"note: {busy}, so the machine can do more than that")
    return 0


def _lines(name: str, found: Forecast, free: int, device: str) -> list[str]:
    plan, load, config = found.plan, found.load, found.plan.config
    short = found.weight_bytes > free
    lines = [
        f"{name}: {found.path} path{f' ({found.reason})' if found.reason else ''}",
        f"weights: {_size(found.weight_bytes)} of {_size(free)} free on {device}{': they do not fit' if short else ''}",
    ]
    lines += [f"KV cache: {_group(group)}" for group in found.groups]
    if plan.backend is None:
        lines.append("KV cache: transformers' own, one for each request; blocks only count its tokens, and not exactly")
    if found.groups:
        reach = {group.window or group.chunk for group in found.groups}
        total = f"KV cache: {found.token_bytes:,} bytes a token in all layers"
        kept = "" if reach == {None} else " if all were kept"
        lines.append(f"{total}, {_size(8192 * found.token_bytes)} for 8,192 tokens{kept}")
    if found.state_bytes:
        lines.append(f"recurrent layers: {found.state_bytes:,} bytes a request, whatever its length")
    lines.append(
        f"KV cache: {_size(found.kv_bytes)}, {config.num_blocks:,} blocks of {config.block_size} tokens and "
        f"{plan.block_bytes:,} bytes ({config.reasons['num_blocks']})"
    )
    lines += _load_lines(found, load)
    return lines + [f"note: {note}" for note in found.notes]


def _group(group: GroupNeed) -> str:
    facts = group.facts
    heads = f"{facts.num_kv_heads} KV heads of {facts.head_dim}"
    heads += f" and {facts.v_head_dim}" if facts.v_head_dim != facts.head_dim else ""
    dtype = str(facts.dtype).removeprefix("torch.")
    reach = f"a window of {group.window:,}" if group.window else f"chunks of {group.chunk:,}" if group.chunk else ""
    return (
        f"{group.token_bytes:,} bytes a token in {group.layers} layers with {reach or 'full attention'} "
        f"({heads}, {dtype})"
    )


def _load_lines(found: Forecast, load: Any) -> list[str]:
    config, blocks = found.plan.config, found.request_blocks
    kept = _size(blocks * found.plan.block_bytes)
    lines = [f"a request of {load.prompt:,} + {load.output:,} tokens: {blocks:,} blocks ({kept})"]
    if found.groups:
        lines[0] += f", {found.waste:.1%} of them unused at its end (room for {found.fragment} in a last block)"
    limits = {
        "tokens": f"{config.max_batch_tokens:,} query tokens a step, prompts included",
        "blocks": f"{config.num_blocks:,} KV blocks",
        "requests": f"max_num_seqs={config.max_num_seqs:,}",
    }
    fits = ", ".join(f"{found.capacities[name]:,} by {name} ({why})" for name, why in limits.items())
    lines.append(f"running together: {found.together:,} of {load.requests:,}; at most {fits}")
    if found.capacities["blocks"] == 0:
        lines.append("first budget to bind: blocks; not one such request fits, and it would be refused")
    else:
        lines.append(f"first budget to bind: {found.binding or 'none, all of them run together'}")
    return lines


def _speed_lines(steps: Steps, speeds: Speeds, found: Forecast) -> list[str]:
    return [
        f"measured: {speeds.bandwidth / 1e9:.1f} GB/s read, {speeds.rate / 1e9:,.0f} GFLOP/s ({speeds.product})",
        f"a step takes at least {duration(steps.one)} for one answer, {duration(steps.all)} for "
        f"{max(1, found.together):,}, {duration(steps.prompts)} full of prompts",
        f"all requests take at least {duration(steps.whole)}: {steps.tok_s:,.0f} output tokens a second, which no "
        f"engine exceeds on this machine",
    ]


def _size(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:,} bytes"
