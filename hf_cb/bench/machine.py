"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import psutil
import torch

FLASH = ("flash-attn", "flash-attn-3", "flash-attn-4")
OPTIONAL = ("bitsandbytes", *FLASH, "gguf", "kernels", "peft", "sentencepiece", "triton")


def versions() -> dict[str, str]:
    """Versions of Python and of what hf_cb stands on."""
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_cb": sys.modules["hf_cb"].__version__,
    }


def optional_packages() -> dict[str, str | None]:
    """Versions of packages that hf_cb or transformers use where they are there; None for the others."""
    found: dict[str, str | None] = {}
    for name in OPTIONAL:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, torch's threads, memory in bytes, and the GPU or None."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def circumstances(model: Any, name: str) -> dict[str, Any]:
    """What figures hold for, without which they mean nothing: when, with which versions, where, and of which model."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "model": {
            "name": name,
            "class": type(model).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "parameters": sum(p.numel() for p in model.parameters()),
        },
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()
