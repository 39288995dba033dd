"""Opening a manager on a model for a while; a persistent one is kept with the model for the next session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_cb.config import EngineConfig
from hf_cb.errors import OptionError
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.models.plan import Need

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

_NAME = "_cached_continuous_batching_manager"  # transformers' own name for it


class _Kept:
    """Holds a manager in a model's attributes; a copied or pickled model gets an empty one."""

    def __init__(self, manager: ContinuousBatchingManager | None = None) -> None:
        self.manager = manager

    def __deepcopy__(self, _: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def kept_manager(model: PreTrainedModel) -> ContinuousBatchingManager | None:
    """The manager that an earlier session left with this model."""
    kept = getattr(model, _NAME, None)
    return kept.manager if isinstance(kept, _Kept) else None


def keep(model: PreTrainedModel, manager: ContinuousBatchingManager) -> None:
    setattr(model, _NAME, _Kept(manager))


def drop_kept_manager(model: PreTrainedModel) -> None:
    """Destroys the kept manager and frees its cache; nothing happens if there is none."""
    manager = kept_manager(model)
    if manager is not None:
        manager.destroy()
        delattr(model, _NAME)


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


@contextmanager
def open_manager(
    model: PreTrainedModel,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    persistent: bool = False,
    need: Need | None = None,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
) -> Iterator[ContinuousBatchingManager]:
    """A running manager. At the end it finishes its requests; after an exception it drops them.

    A persistent one is kept for the next session, and sized for any work, not only for this one's.
    """
    kept = kept_manager(model)
    manager = get_manager(model, config, tokenizer, generation_config, None if persistent else need)
    shared = manager.is_running()  # another session of the same kept manager goes on after this one
    manager.start()
    finished = False
    try:
        yield manager
        finished = True
    finally:
        if persistent and manager is not kept:
            keep(model, manager)
        if not shared:
            manager.stop(block=block, timeout=timeout, hard_stop=not finished)
