"""Models whose layers are spread over several processes: transformers' tensor parallelism (`tp_plan="auto"`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from hf_cb.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tp_group(model: PreTrainedModel) -> Any:
    """The process group over which a model's layers are spread, each process with its share of every layer; None for
    a model that is whole (as it is everywhere if its class has no plan for this)."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and mesh.mesh_dim_names is not None:
        mesh = mesh["tp"] if "tp" in mesh.mesh_dim_names else None
    return mesh.get_group() if mesh is not None and mesh.size() > 1 and is_sharded(model) else None


def is_sharded(model: nn.Module) -> bool:
    """Whether any weight is a DTensor, so that plain kernels cannot take it."""
    return not all(map(is_whole, model.parameters()))


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether each process has all of a weight."""
    return _mesh_of(parameter) is None


def check_sharding(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError for a model that is spread in another way than by tensor parallelism."""
    meshes = [mesh for p in model.parameters() if (mesh := _mesh_of(p)) is not None and mesh.size() > 1]
    mesh = getattr(model, "_device_mesh", None)
    sizes = dict(zip(mesh.mesh_dim_names or ("tp",), mesh.shape, strict=False)) if mesh is not None else {}
    ranks = sizes.pop("tp", 1)
    given = getattr(model.config, "distributed_config", None)
    sizes |= {name: getattr(given, f"{name}_size", None) or 1 for name in ("dp", "pp")}
    experts = getattr(given, "ep_size", None) or 1
    if math.prod(sizes.values()) > 1 or (ranks == 1 and meshes) or experts not in (1, ranks):
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over processes by something else than tensor parallelism, where the "
            f"processes do not all compute the same tokens: load it with tp_plan='auto' alone."
        )


def _mesh_of(parameter: nn.Parameter) -> Any:
    """The processes that hold a share of a weight; None for one that is whole."""
    if not distributed.is_available():
        return None
    from torch.distributed.tensor import DTensor

    return parameter.device_mesh if isinstance(parameter, DTensor) else None
