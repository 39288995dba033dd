"""Where a model computes, and whose turn it is."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_turns: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def device_of(model: PreTrainedModel) -> torch.device:
    """The model's device, or the one that accelerate computes on: between uses, weights that it offloads are "meta"."""
    device = model.device
    if device.type != "meta":
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    given = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(d) for d in given if d is not None), device)


@contextlib.contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """As in the thread that computes steps, whatever the caller has: what autocast makes of a model is another."""
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", device.type} - {"meta"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def turn(model: PreTrainedModel, always: bool = False) -> AbstractContextManager[Any]:
    """To be held during a forward. Where accelerate loads a module's weights for each use, two forwards at a time would
    take them away from each other; other models can do several, unless `always`."""
    if not always and not any(getattr(module, "_hf_hook", None) is not None for module in model.modules()):
        return contextlib.nullcontext()
    with _lock:
        return _turns.setdefault(model, threading.RLock())
