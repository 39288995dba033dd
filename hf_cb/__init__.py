"""hf_cb: continuous batching for Hugging Face models, in the process where the model already lives."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_cb import policies
    from hf_cb.config import EngineConfig
    from hf_cb.core import Delta, GenerationOutput, RequestMetrics
    from hf_cb.demo import demo_model
    from hf_cb.errors import (
        HfCbError,
        IncompatibleTransformersError,
        ManagerStoppedError,
        OptionError,
        PromptError,
        QueueFullError,
        RankError,
        RequestCancelledError,
        RequestFailedError,
        UnsupportedModelError,
    )
    from hf_cb.manager.display import live
    from hf_cb.manager.manager import ContinuousBatchingManager
    from hf_cb.patching import accelerate, explain, patch, restore, unpatch
    from hf_cb.steps import StepRecord

__version__ = "0.1.0"

_HOMES = {
    "config": ["EngineConfig"],
    "core": ["Delta", "GenerationOutput", "RequestMetrics"],
    "steps": ["StepRecord"],
    "demo": ["demo_model"],
    "errors": [
        "HfCbError",
        "IncompatibleTransformersError",
        "ManagerStoppedError",
        "OptionError",
        "PromptError",
        "QueueFullError",
        "RankError",
        "RequestCancelledError",
        "RequestFailedError",
        "UnsupportedModelError",
    ],
    "manager.display": ["live"],
    "manager.manager": ["ContinuousBatchingManager"],
    "patching": ["accelerate", "explain", "patch", "restore", "unpatch"],
}
_ROOMS = ["policies"]  # public modules
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ContinuousBatchingManager",
    "Delta",
    "EngineConfig",
    "GenerationOutput",
    "HfCbError",
    "IncompatibleTransformersError",
    "ManagerStoppedError",
    "OptionError",
    "PromptError",
    "QueueFullError",
    "RankError",
    "RequestCancelledError",
    "RequestFailedError",
    "RequestMetrics",
    "StepRecord",
    "UnsupportedModelError",
    "accelerate",
    "demo_model",
    "explain",
    "live",
    "patch",
    "policies",
    "restore",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used, so that `hf-cb --help` does not wait for torch (PEP 562)."""
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
