"""From a loaded model to an engine with its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_cb.config import EngineConfig
from hf_cb.engine.engine import Engine
from hf_cb.engine.policies import make_policy
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import Need, plan_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_engine(model: PreTrainedModel, options: EngineConfig, need: Need | None = None) -> Engine:
    """An engine with its KV cache allocated; raises as `plan_model`."""
    plan = plan_model(model, options, need)
    runner = PagedModel(model, plan.trace, plan.groups, plan.backend, plan.config.num_blocks, plan.config.block_size)
    return Engine(runner, plan.config, make_policy(options.policy))
