"""Opening a manager on a model for a while; several sessions may share a kept one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from hf_cb.config import EngineConfig
from hf_cb.errors import OptionError
from hf_cb.manager.kept import keep, kept_manager
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.models.plan import Need

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

_lock = threading.RLock()  # while a manager is chosen
_sessions: dict[object, ContinuousBatchingManager] = {}  # that are open
_complete: dict[object, ContinuousBatchingManager] = {}  # of those that submit nothing more


def get_manager(
    model: PreTrainedModel,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: GenerationConfig | None = None,
    need: Need | None = None,
) -> ContinuousBatchingManager:
    """The kept manager, or a new one, not started.

    Raises:
        OptionError: the kept manager has other options than these.
    """
    manager = kept_manager(model)
    if manager is None:
        return ContinuousBatchingManager(model, generation_config, config, tokenizer, need)
    if config not in (EngineConfig(), manager.config):
        raise OptionError(
            f"This model keeps a manager with other options ({manager.config}): call "
            f"model.destroy_cached_continuous_batching_manager() first."
        )
    manager.tokenizer = tokenizer or manager.tokenizer
    manager.generation_config = generation_config or manager.generation_config
    return manager


def open_manager(
    model: PreTrainedModel,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    persistent: bool = False,
    need: Need | None = None,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    warmup: bool = False,
) -> AbstractContextManager[ContinuousBatchingManager]:
    """A running manager. A persistent one is kept for the next session, and sized for any work, not only for this
    one's."""

    def choose() -> ContinuousBatchingManager:
        manager = get_manager(model, config, tokenizer, generation_config, None if persistent else need)
        if persistent:
            keep(model, manager)
        return manager

    return running(choose, block, timeout, warmup)


@contextmanager
def running(
    choose: Callable[[], ContinuousBatchingManager],
    block: bool = True,
    timeout: float | None = None,
    warmup: bool = False,
) -> Iterator[ContinuousBatchingManager]:
    """A manager, running. The last session on it ends it: once its requests are finished, or, after an exception, at
    once. `choose` is called by one thread at a time.
    """
    mine, finished, last = object(), False, False
    try:
        with _lock:
            manager = _sessions[mine] = choose()
        manager.start()
        _tell(manager)
        if warmup:
            manager.warmup()
        yield manager
        finished = True
    except GeneratorExit:  # perhaps by a garbage collection, in whatever thread: nobody may wait there
        block = False
        raise
    finally:
        try:
            last = mine in _sessions and _close(mine, hard=not finished)
        finally:
            _sessions.pop(mine, None)
        if last and block:
            manager.join(timeout=timeout)


def _close(mine: object, hard: bool) -> bool:
    """Whether it was its manager's last session, which is then told to end. Takes the loop's lock alone: a garbage
    collection may close a session in a thread that holds any other of ours."""
    manager = _sessions[mine]
    with manager.loop.lock:  # a session that begins is counted before it looks whether the loop is to end
        del _sessions[mine]
        last = manager not in _sessions.values()
        if last:
            manager.stop(block=False, hard_stop=hard)
        else:
            _tell(manager)
    return last


@contextmanager
def complete(manager: ContinuousBatchingManager) -> Iterator[None]:
    """Inside, one of the manager's sessions submits nothing more. Once that is so of all of them, a policy that holds
    a batch back for others to join need not."""
    mine = object()
    try:
        _complete[mine] = manager
        _tell(manager)
        yield
    finally:
        _complete.pop(mine, None)


def _tell(manager: ContinuousBatchingManager) -> None:
    """After what was submitted, and before what comes."""
    with manager.loop.lock:
        open_, complete_ = (list(each.values()).count(manager) for each in (_sessions, _complete))
        manager.loop.post(partial(manager.engine.scheduler.expect, open_ > complete_))
