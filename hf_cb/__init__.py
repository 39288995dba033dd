"""hf_cb: continuous batching for Hugging Face models, in the process where the model already lives."""

from hf_cb.config import EngineConfig
from hf_cb.core import Delta, GenerationOutput, RequestMetrics, StepRecord
from hf_cb.demo import demo_model
from hf_cb.errors import (
    HfCbError,
    IncompatibleTransformersError,
    ManagerStoppedError,
    OptionError,
    PromptError,
    QueueFullError,
    RequestCancelledError,
    RequestFailedError,
    UnsupportedModelError,
)
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.patching import accelerate, explain, patch, restore, unpatch

__version__ = "0.1.0"

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
    "RequestCancelledError",
    "RequestFailedError",
    "RequestMetrics",
    "StepRecord",
    "UnsupportedModelError",
    "accelerate",
    "demo_model",
    "explain",
    "patch",
    "restore",
    "unpatch",
]
