"""The paths that a model can be driven on, fastest first, and a runner on one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_cb.attention.cpu import CpuBackend
from hf_cb.config import EngineConfig
from hf_cb.models.dense import DenseModel
from hf_cb.models.device import device_of
from hf_cb.models.drawing import draw_for
from hf_cb.models.fused.gpu_stack import CapturedFusedModel, FusedModel
from hf_cb.models.fused.stack import StackModel
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import ModelPlan, Need, plan_dense, plan_paged
from hf_cb.models.recorded.capture import cuda_captures
from hf_cb.models.recorded.captured import CapturedModel
from hf_cb.models.sharding import is_sharded
from hf_cb.modules.wanted import Mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# dense: a cache for each request, decoding as one padded batch; single: every request by itself; recompute: no cache
PATHS = ("paged", "dense", "single", "recompute")


def plan_path(path: str, model: PreTrainedModel, options: EngineConfig, need: Need | None = None) -> ModelPlan:
    """Sizes and, for the paged path, layers and backend; allocates nothing."""
    return plan_paged(model, options, need) if path == "paged" else plan_dense(model, options, need)


def make_runner(path: str, model: PreTrainedModel, plan: ModelPlan, modules: Mode = "off") -> PagedModel | DenseModel:
    """What computes the steps, with its KV cache allocated."""
    if path != "paged":
        return DenseModel(model, batched=path == "dense", recompute=path == "recompute")
    assert plan.backend is not None
    config = plan.config
    arguments = (model, plan.trace, plan.groups, plan.backend, config.num_blocks, config.block_size, config.host_blocks)
    fused = modules == "fused" and not isinstance(plan.backend, CpuBackend)  # which has its own way
    if config.cuda_graphs and not is_sharded(model):  # not all ranks might record in the same step
        widest = -(-config.max_model_len // config.block_size)
        captured = CapturedFusedModel if fused else CapturedModel
        return captured(cuda_captures, draw_for(device_of(model)), config.most_rows, widest, *arguments)
    if fused:
        return FusedModel(*arguments)
    return PagedModel(*arguments) if modules == "off" else StackModel(modules, *arguments)
