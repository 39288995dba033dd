"""Zeros that take memory only where something is written."""

from __future__ import annotations

import math
import mmap
import platform
import sys

import torch
from torch import Tensor

LEAST = 2**20  # bytes below which it does not matter
# Linux: not counted as if all of it were used, or a process with several caches could not fork (no name before 3.13)
NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0


def lazy_zeros(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """As `torch.zeros`, which writes to all of it. On a CPU the system gives each page when it is first used, and takes
    all back at once when the tensor goes."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < LEAST or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
