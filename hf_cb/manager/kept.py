"""Managers that are kept with their model from one session to the next.

They hang on the model itself, under transformers' own name, so that they go when it goes.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_cb.manager.manager import ContinuousBatchingManager

_NAME = "_cached_continuous_batching_manager"  # transformers' own name for it
_models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


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
    """For the next session."""
    setattr(model, _NAME, _Kept(manager))
    _models.add(model)


def drop_kept_manager(model: PreTrainedModel) -> None:
    """Destroys the kept manager; its cache is freed with the last reference to it. Nothing happens if there is none."""
    manager = kept_manager(model)
    if manager is not None:
        manager.destroy()
        delattr(model, _NAME)
        _models.discard(model)


def models_with_kept_managers() -> list[PreTrainedModel]:
    return list(_models)
