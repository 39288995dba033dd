"""What other threads are doing with a model right now, told from their frames."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

import torch
from torch import nn

_CALL = nn.Module._call_impl.__code__  # the frame of every call of a module
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_STDLIB = os.path.dirname(threading.__file__)


def at_work() -> dict[int, tuple[int, int]]:
    """By thread, the frame and instruction of the others that may be inside of an operation: one in the standard
    library only waits for something."""
    found = {}
    for thread, frame in sys._current_frames().items():
        name = frame.f_code.co_filename
        waits = name.startswith(_STDLIB) and "site-packages" not in name
        if thread != threading.get_ident() and not waits:
            found[thread] = (id(frame), frame.f_lasti)
    return found


def is_computing(model: nn.Module) -> bool:
    """Whether another thread is in a forward of the model, or in a backward pass of anything."""
    modules = {id(m) for m in model.modules()}
    for thread, frame in sys._current_frames().items():
        at: FrameType | None = frame if thread != threading.get_ident() else None
        while at is not None:
            if at.f_code is _BACKWARD or (at.f_code is _CALL and id(at.f_locals.get("self")) in modules):
                return True
            at = at.f_back
    return False
