"""From a loaded model to an engine with its cache, on the path that the probe found right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_cb.config import EngineConfig
from hf_cb.engine.engine import Engine, Runner
from hf_cb.engine.policies import Policy, make_policy
from hf_cb.errors import OptionError
from hf_cb.manager.probe import Verdict, judge
from hf_cb.manager.training_mode import in_eval
from hf_cb.models.dense import DenseModel
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import ModelPlan, Need, plan_dense, plan_paged
from hf_cb.models.support import check_supported

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plan_engine(model: PreTrainedModel, options: EngineConfig, need: Need | None = None) -> tuple[Verdict, ModelPlan]:
    """Which path, and how; allocates nothing.

    Raises:
        UnsupportedModelError, OptionError: naming the model or the option, and the remedy.
    """
    check_supported(model)
    with in_eval(model):
        verdict = judge(model)
        if verdict.path == "paged":
            return verdict, plan_paged(model, options, need)
        if options.attention is not None:
            raise OptionError(
                f"attention={options.attention!r} needs the paged path, and {type(model).__name__} takes the "
                f"{verdict.path} path: {verdict.reason}."
            )
        return verdict, plan_dense(model, options, need)


def build_engine(model: PreTrainedModel, options: EngineConfig, need: Need | None = None) -> Engine:
    """An engine with its KV cache allocated; raises as `plan_engine`."""
    policy = make_policy(options.policy)
    with torch.inference_mode(False):  # the loop's thread will write to the cache outside of the caller's mode
        return _build(model, options, need, policy)


def _build(model: PreTrainedModel, options: EngineConfig, need: Need | None, policy: Policy) -> Engine:
    verdict, plan = plan_engine(model, options, need)
    runner: Runner
    if plan.backend is not None:
        config = plan.config
        runner = PagedModel(model, plan.trace, plan.groups, plan.backend, config.num_blocks, config.block_size)
    else:
        runner = DenseModel(model, recompute=verdict.path == "recompute")
    return Engine(runner, plan.config, policy)
