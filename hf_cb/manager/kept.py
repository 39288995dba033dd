"""Managers that are kept with their model from one session to the next.

They hang on the model itself, so that they go when it goes: the one that a user keeps under transformers' own name, and
beside it the one that the model's `generate` calls share.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_cb.manager.manager import ContinuousBatchingManager

SESSIONS = "_cached_continuous_batching_manager"  # transformers' own name for it
GENERATE = "_hf_cb_generate_manager"
_models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


class _Kept:
    """Holds a manager in a model's attributes; a copied or pickled model gets an empty one."""

    def __init__(self, manager: ContinuousBatchingManager | None = None) -> None:
        self.manager = manager

    def __deepcopy__(self, _: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def kept_manager(model: PreTrainedModel, name: str = SESSIONS) -> ContinuousBatchingManager | None:
    """The manager that an earlier session left with this model."""
    kept = getattr(model, name, None)
    return kept.manager if isinstance(kept, _Kept) else None


def keep(model: PreTrainedModel, manager: ContinuousBatchingManager, name: str = SESSIONS) -> None:
    """For the next session."""
    setattr(model, name, _Kept(manager))
    _models.add(model)


def forget(model: PreTrainedModel, name: str) -> None:
    """The next session makes another one."""
    if kept_manager(model, name) is not None:
        delattr(model, name)


def drop_kept_manager(model: PreTrainedModel) -> None:
    """Destroys the kept managers; a cache is freed with the last reference to it. Nothing happens if there are none."""
    for name in (SESSIONS, GENERATE):
        manager = kept_manager(model, name)
        if manager is not None:
            manager.destroy()
            forget(model, name)
    _models.discard(model)


def models_with_kept_managers() -> list[PreTrainedModel]:
    return list(_models)
