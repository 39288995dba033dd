"""A model in `eval()` while managers run on it, and afterwards exactly as it was, submodule by submodule."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_lock = threading.RLock()  # a garbage collection inside may end up here again
_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_training: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()


def enter_eval(model: nn.Module) -> None:
    """Puts the model in `eval()`; the first of several users notes which modules were training."""
    with _lock:
        if _users.get(model, 0) == 0:
            _training[model] = [weakref.ref(m) for m in model.modules() if m.training]
            if _training[model]:
                model.eval()
        _users[model] = _users.get(model, 0) + 1


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """`enter_eval` and `leave_eval` around a block."""
    enter_eval(model)
    try:
        yield
    finally:
        leave_eval(model)


def leave_eval(model: nn.Module) -> None:
    """The last user puts the noted modules back to training."""
    with _lock:
        _users[model] -= 1
        if _users[model] == 0:
            for reference in _training.pop(model):
                module = reference()
                if module is not None:
                    module.training = True
