"""The paths that a model can be driven on, fastest first, and an engine on one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_cb.config import EngineConfig
from hf_cb.engine.engine import Engine
from hf_cb.engine.policies import Policy
from hf_cb.models.dense import DenseModel
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import ModelPlan, Need, plan_dense, plan_paged
from hf_cb.models.stack import StackModel
from hf_cb.modules.wanted import Mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# dense: a cache for each request, decoding as one padded batch; single: every request by itself; recompute: no cache
PATHS = ("paged", "dense", "single", "recompute")


def plan_path(path: str, model: PreTrainedModel, options: EngineConfig, need: Need | None = None) -> ModelPlan:
    """Sizes and, for the paged path, layers and backend; allocates nothing."""
    return plan_paged(model, options, need) if path == "paged" else plan_dense(model, options, need)


def build_path(
    path: str, model: PreTrainedModel, plan: ModelPlan, policy: Policy | None = None, modules: Mode = "off"
) -> Engine:
    """An engine with its KV cache allocated."""
    if path != "paged":
        runner = DenseModel(model, batched=path == "dense", recompute=path == "recompute")
        return Engine(runner, plan.config, policy)
    assert plan.backend is not None
    config = plan.config
    arguments = (model, plan.trace, plan.groups, plan.backend, config.num_blocks, config.block_size)
    paged = PagedModel(*arguments) if modules == "off" else StackModel(modules, *arguments)
    return Engine(paged, config, policy)
