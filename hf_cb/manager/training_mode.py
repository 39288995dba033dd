"""A model in `eval()` while managers run on it, and afterwards exactly as it was, submodule by submodule; and what they
do if somebody calls `train()` meanwhile."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

logger = logging.getLogger("hf_cb")
_lock = threading.RLock()  # a garbage collection inside may end up here again
_users: weakref.WeakKeyDictionary[nn.Module, set[object]] = weakref.WeakKeyDictionary()
_training: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()


def enter_eval(model: nn.Module, user: object) -> None:
    """Puts the model in `eval()` until this user, and all others, have called `leave_eval`; the first one notes which
    modules were training. Users are named, not counted: one that is interrupted in the middle just leaves."""
    with _lock:
        users = _users.setdefault(model, set())
        first = not users
        if first:
            _restore(model)  # what an interrupted leave_eval() has left
            _training[model] = [weakref.ref(m) for m in model.modules() if m.training]
        users.add(user)
        if first and _training[model]:
            model.eval()


def leave_eval(model: nn.Module, user: object) -> None:
    """Takes back this user's `enter_eval`, if there was one; the last puts the noted modules back to training."""
    with _lock:
        users = _users.get(model, set())
        users.discard(user)
        if not users:
            _restore(model)
            _users.pop(model, None)


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """`enter_eval` and `leave_eval` around a block."""
    user = object()
    try:
        enter_eval(model, user)
        yield
    finally:
        leave_eval(model, user)


def _restore(model: nn.Module) -> None:
    for reference in _training.get(model, ()):
        module = reference()
        if module is not None:
            module.training = True
    _training.pop(model, None)


class TrainingWatch:
    """For how long somebody has trained a model while there is work for it.

    Args:
        timeout: seconds after which this is an error.
    """

    def __init__(self, model: nn.Module, timeout: float) -> None:
        self._model, self._timeout = model, timeout
        self.since: float | None = None  # on time.monotonic()

    def goes_on(self, has_work: bool, paused: bool) -> bool:
        """Whether the model is in training mode; `paused`: as it should be done, and so without a limit.

        Raises:
            RuntimeError: it has been for too long.
        """
        if not (self._model.training and has_work):
            self.since = None
            return False
        now, limit = time.monotonic(), self._timeout
        if self.since is None:
            logger.warning("The model is in training mode: generation waits up to %s s for model.eval().", limit)
        if self.since is None or paused:
            self.since = now
        if now - self.since > limit:
            how = "train inside `with manager.pause():`, or call model.eval()"
            raise RuntimeError(f"The model has been in training mode for {limit} s: {how}.")
        return True
