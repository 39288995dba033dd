"""Say what hf_cb finds on this machine, and what it would do with a model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from typing import Any

from hf_cb.cli import model as models
from hf_cb.errors import IncompatibleTransformersError, UnsupportedModelError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the findings; 1 if hf_cb cannot work here, or not with the model that was named."""
    found = _findings(args)
    if args.model is not None:
        found["model"] = _explain(args)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(_as_text(found))
    refused = args.model is not None and found["model"]["path"] == "refused"
    return int(found["transformers_problem"] is not None or refused)


def _findings(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from hf_cb.bench.machine import machine, optional_packages, versions
    from hf_cb.models.plan import free_memory

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return {
        "versions": versions(),
        "transformers_problem": _transformers_problem(),
        "device": str(device),
        "machine": machine(),
        "free_memory_bytes": free_memory(device),
        "attention": _attention(device),
        "native_kernels": _native_kernels(),
        "optional_packages": optional_packages(),
    }


def _transformers_problem() -> str | None:
    from hf_cb.patching import patch, unpatch

    try:
        patch()
    except IncompatibleTransformersError as error:
        return str(error)
    unpatch()
    return None


def _attention(device: Any) -> dict[str, Any]:
    """The backend that a usual layer gets on this device, and for each backend why it cannot compute it, or None."""
    from hf_cb.attention.choice import choose_backend, survey, usual_layer

    backend, reason = choose_backend(None, [usual_layer(device)])
    return {"chosen": backend.name, "reason": reason, "problems": survey(device)}


def _native_kernels() -> dict[str, Any]:
    """The compiled CPU kernels: their file, the variants that this processor runs (fastest first), or what is wrong."""
    from hf_cb.kernels.cpu import library as lib

    found = lib.library()
    return {
        "file": str(found.path) if found else None,
        "variants": list(found.variants) if found else [],
        "problem": lib.problem(),
    }


def _explain(args: argparse.Namespace) -> dict[str, Any]:
    from hf_cb.patching import accelerate, explain, restore

    model, tokenizer = models.load(args)
    with contextlib.suppress(UnsupportedModelError):  # explain says why
        accelerate(model, tokenizer, **models.engine_options(args))
    try:
        explanation = explain(model)
    finally:
        restore(model)
    return dataclasses.asdict(explanation) | {"text": str(explanation)}


def _as_text(found: dict[str, Any]) -> str:
    machine, kernels = found["machine"], found["native_kernels"]
    attention, optional = found["attention"], found["optional_packages"].items()
    packages = [f"{name} {version}" for name, version in optional if version is not None]
    absent = [name for name, version in optional if version is None]
    lines = [
        "versions: " + ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        f"transformers: {found['transformers_problem'] or 'has all that hf_cb builds on'}",
        f"device: {found['device']}" + (f" ({machine['gpu']})" if machine["gpu"] else ""),
        f"processor: {machine['cpu']}, {machine['cpu_capability']}; {machine['cores']} cores, "
        f"{machine['torch_threads']} torch threads",
        f"free memory: {found['free_memory_bytes'] / 2**30:.2f} GiB",
        f"attention: {attention['chosen']} is chosen for bfloat16 heads of 128 ({attention['reason']})",
        *(f"  {name}: {problem or 'available'}" for name, problem in attention["problems"].items()),
        "native kernels: "
        + (", ".join(kernels["variants"]) or f"{kernels['problem']}; torch's own operators do all the work"),
        f"optional packages: {', '.join(packages) or 'none'} (not installed: {', '.join(absent) or 'none'})",
    ]
    if "model" in found:
        lines += ["", found["model"]["text"]]
    return "\n".join(lines)
