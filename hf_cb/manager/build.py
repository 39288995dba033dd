"""From a loaded model to an engine with its cache, on the path that the probe found right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_cb.config import EngineConfig
from hf_cb.engine.engine import Engine
from hf_cb.errors import OptionError, UnsupportedModelError
from hf_cb.kernels.device import finish
from hf_cb.manager.probe import Verdict, forget_verdict, judge
from hf_cb.manager.ranks.leading import build_path, plan_path
from hf_cb.manager.training_mode import in_eval
from hf_cb.models.device import device_of, without_autocast
from hf_cb.models.plan import ModelPlan, Need
from hf_cb.models.support import check_supported
from hf_cb.modules.wanted import wanted
from hf_cb.policies import make_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plan_engine(model: PreTrainedModel, options: EngineConfig, need: Need | None = None) -> tuple[Verdict, ModelPlan]:
    """Which path, and how; allocates nothing.

    Raises:
        UnsupportedModelError, OptionError: naming the model or the option, and the remedy.
    """
    check_supported(model)
    with in_eval(model), without_autocast(device_of(model)):
        verdict = judge(model)
        for name in ("attention", "kv_dtype", "cpu_offload_space"):
            value = getattr(options, name)
            if verdict.path != "paged" and value not in (None, 0):
                raise OptionError(
                    f"{name}={value!r} needs the paged path, and {type(model).__name__} takes the {verdict.path} path: "
                    f"{verdict.reason}. Leave {name} unset."
                )
        try:
            return verdict, plan_path(verdict.path, model, options, need)
        except UnsupportedModelError:  # it is not what it was when it was judged: hooks have come, or other modules
            forget_verdict(model)
            verdict = judge(model)
            return verdict, plan_path(verdict.path, model, options, need)


def build_engine(model: PreTrainedModel, options: EngineConfig, need: Need | None = None) -> Engine:
    """An engine with its KV cache allocated; raises as `plan_engine`."""
    policy = make_policy(options.policy)
    with torch.inference_mode(False):  # the loop's thread will write to the cache outside of the caller's mode
        verdict, plan = plan_engine(model, options, need)
        with in_eval(model), without_autocast(device_of(model)):
            engine = build_path(verdict.path, model, plan, policy, options.modules or wanted(model))
        finish({parameter.device for parameter in model.parameters()})  # the loop's thread has a stream of its own
        return engine
