"""Opening a manager on a model for a while; several sessions may share a kept one."""

from __future__ import annotations

import threading
from collections import Counter
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

_lock = threading.RLock()  # a garbage collection inside may close an abandoned session
_sessions: Counter[ContinuousBatchingManager] = Counter()  # how many are open on each manager
_complete: Counter[ContinuousBatchingManager] = Counter()  # how many of them submit nothing more


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
    with _lock:
        manager = choose()
        _sessions[manager] += 1
    finished = False
    try:
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
        with _lock:
            _sessions[manager] -= 1
            last = _sessions[manager] == 0
            if last:
                del _sessions[manager]
                manager.stop(block=False, hard_stop=not finished)
            else:
                _tell(manager)
        if last and block:
            manager.join(timeout=timeout)


@contextmanager
def complete(manager: ContinuousBatchingManager) -> Iterator[None]:
    """Inside, one of the manager's sessions submits nothing more. Once that is so of all of them, a policy that holds
    a batch back for others to join need not."""
    with _lock:
        _complete[manager] += 1
        _tell(manager)
    try:
        yield
    finally:
        with _lock:
            _complete[manager] -= 1
            if not _complete[manager]:
                del _complete[manager]


def _tell(manager: ContinuousBatchingManager) -> None:
    """After what was submitted, and before what comes."""
    with _lock:
        manager.loop.post(partial(manager.engine.scheduler.expect, _sessions[manager] > _complete[manager]))
