"""How a loaded model will be driven: its layers traced, a backend chosen, the cache sized. Nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from hf_cb.attention.backend import AttentionBackend, choose_backend
from hf_cb.config import EngineConfig, ResolvedConfig, Surroundings, resolve
from hf_cb.models.groups import LayerGroup, group_layers, storage_layers
from hf_cb.models.paged import Trace, trace_layers
from hf_cb.models.support import check_supported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNKNOWN_LENGTH = 4096  # for a model whose config names no number of positions


@dataclass(frozen=True)
class Need:
    """All the work that will come, where that is known: KV tokens and sequences. Bounds the cache."""

    tokens: int
    seqs: int


@dataclass
class ModelPlan:
    """How a model will be driven, before any cache is allocated."""

    trace: Trace
    groups: list[LayerGroup]
    backend: AttentionBackend
    backend_reason: str
    config: ResolvedConfig


def model_length(model: PreTrainedModel) -> int:
    """Tokens of one sequence that the model has positions for."""
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or UNKNOWN_LENGTH)


def plan_model(model: PreTrainedModel, options: EngineConfig, need: Need | None = None) -> ModelPlan:
    """Decides everything.

    Raises:
        UnsupportedModelError, OptionError: naming the model or the option, and the remedy.
    """
    check_supported(model)
    trace = trace_layers(model)
    backend, why = choose_backend(options.attention, trace.layers)
    groups = group_layers(trace.layers, options.max_model_len or model_length(model))
    stored = [trace.layers[i] for i in storage_layers(groups)]
    around = Surroundings(
        model_len=model_length(model),
        free_bytes=free_memory(model.device),
        device_type=model.device.type,
        block_bytes=lambda block_size: sum(backend.block_bytes(layer, block_size) for layer in stored),
        num_groups=len(groups),
        need_tokens=need.tokens if need else None,
        need_seqs=need.seqs if need else None,
    )
    return ModelPlan(trace, groups, backend, why, resolve(options, around))


def free_memory(device: torch.device) -> int:
    """Bytes that may be allocated on the device; a container's own limit counts."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, *_cgroup_rooms())


def _cgroup_rooms() -> list[int]:
    """What memory limits of the process's cgroup (versions 1 and 2) leave; file caches count as free, as the kernel
    drops them first."""
    rooms = [2**62]
    for folder, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_cache",)),
    ):
        try:
            stat = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
            held = int(_read(f"{folder}/{used}")) - sum(int(stat.get(name, 0)) for name in cache)
            rooms.append(max(0, int(_read(f"{folder}/{limit}")) - held))
        except (OSError, ValueError):  # no such cgroup, or "max"
            continue
    return rooms


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
