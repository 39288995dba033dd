"""How a loaded model will be driven: its layers traced, a backend chosen, the cache sized. Nothing is allocated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import psutil
import torch

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.choice import choose_backend
from hf_cb.config import EngineConfig
from hf_cb.models.device import device_of
from hf_cb.models.groups import LayerGroup, group_layers, storage_layers
from hf_cb.models.trace import Trace, trace_layers
from hf_cb.models.warmup import working_bytes
from hf_cb.sizes import BLOCK_SIZE, USUAL_SEQS, USUAL_TOKENS, ResolvedConfig, Surroundings, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNKNOWN_LENGTH = 4096  # for a model whose config names no number of positions


@dataclass(frozen=True)
class Need:
    """All the work that will come, where that is known: KV tokens and sequences. Bounds the cache."""

    tokens: int
    seqs: int


@dataclass(frozen=True)
class Room:
    """Where a model that has only shapes is to compute, and what will be free there beside its weights."""

    device: torch.device
    free_bytes: int


@dataclass
class ModelPlan:
    """How a model will be driven, before any cache is allocated. Without a backend: densely, with no trace."""

    config: ResolvedConfig
    groups: list[LayerGroup]
    block_bytes: int
    trace: Trace = field(default_factory=Trace)
    backend: AttentionBackend | None = None
    backend_reason: str = ""
    number: int = 0  # of the same plan on the other ranks of a tensor-parallel model

    @property
    def layout(self) -> tuple[int, int]:
        """What block tables depend on: the size of a block, and how many groups of layers have one."""
        return self.config.block_size, len(self.groups)

    @property
    def sizes(self) -> dict[str, int]:
        """What memory decides, on each rank for itself."""
        return {"num_blocks": self.config.num_blocks, "host_blocks": self.config.host_blocks}


def model_length(model: PreTrainedModel) -> int:
    """Tokens of one sequence that the model has positions for; dynamic rotary scaling is there to go beyond."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    given = (getattr(config, name, None) for name in names)
    length = next((v for v in given if isinstance(v, int) and v > 0), UNKNOWN_LENGTH)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    return int(length * max(k.get("factor", 1) if k.get("rope_type") == "dynamic" else 1 for k in kinds))


def plan_paged(
    model: PreTrainedModel, options: EngineConfig, need: Need | None = None, room: Room | None = None
) -> ModelPlan:
    """The plan of the paged path; of a model without weights, for the `room` that it will have.

    Raises:
        UnsupportedModelError, OptionError: naming the model or the option, and the remedy.
    """
    trace = trace_layers(model)
    if room is not None:
        trace.layers = [replace(layer, device=room.device) for layer in trace.layers]
    backend, why = choose_backend(options.attention, trace.layers, options.kv_dtype, options.block_size)
    # with no attention at all blocks only count tokens
    groups = group_layers(trace.layers, options.max_model_len or model_length(model)) or [LayerGroup((), ())]
    stored = [trace.layers[i] for i in storage_layers(groups)]

    def block_bytes(block_size: int) -> int:
        return sum(backend.block_bytes(layer, block_size) for layer in stored) or 1

    if room is None:
        free = _free_for([(layer.device, backend.block_bytes(layer, 1)) for layer in stored], model, options)
        room = Room(device_of(model), free)
    config = resolve(options, _surroundings(model, room, block_bytes, len(groups), need, trace, backend))
    return ModelPlan(config, groups, block_bytes(config.block_size), trace, backend, why)


def plan_dense(
    model: PreTrainedModel, options: EngineConfig, need: Need | None = None, room: Room | None = None
) -> ModelPlan:
    """The plan of the dense path: blocks only count tokens, of the size that full attention would need."""
    text = model.config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 1) or 1
    token_bytes = 2 * layers * (getattr(text, "hidden_size", None) or 1024) * model.dtype.itemsize

    def block_bytes(block_size: int) -> int:
        return block_size * token_bytes

    room = room or Room(device_of(model), free_memory(device_of(model)))
    config = resolve(options, _surroundings(model, room, block_bytes, 1, need))
    return ModelPlan(config, [LayerGroup((), ())], block_bytes(config.block_size))


def _free_for(layers: list[tuple[torch.device, int]], model: PreTrainedModel, options: EngineConfig) -> int:
    """Bytes for layers that lie on these devices, each with its bytes a token: the fullest device decides. What steps
    take there is not free."""
    share: Counter[torch.device] = Counter()
    for device, size in layers:
        share[device] += size
    whole = share.total()
    steps = _step_bytes(model, options) if any(d.type == "cuda" for d in share) else Counter()
    free = {d: max(0, free_memory(d) - steps[d]) for d in share}
    return min((free[d] * whole // size for d, size in share.items()), default=free_memory(device_of(model)))


def _step_bytes(model: PreTrainedModel, options: EngineConfig) -> Counter[torch.device]:
    """The largest step, and the memory that recorded decode steps keep: that of the largest of them."""
    tokens, rows = options.max_batch_tokens or USUAL_TOKENS, options.max_num_seqs or USUAL_SEQS
    found = working_bytes(model, tokens, rows)
    return found + working_bytes(model, rows, rows) if options.cuda_graphs is not False else found


def _surroundings(
    model: PreTrainedModel,
    room: Room,
    block_bytes: object,
    num_groups: int,
    need: Need | None,
    trace: Trace | None = None,
    backend: AttentionBackend | None = None,
) -> Surroundings:
    return Surroundings(
        model_len=model_length(model),
        free_bytes=room.free_bytes,
        device_type=room.device.type,
        block_bytes=block_bytes,
        num_groups=num_groups,
        state_bytes=trace.recurrent.state_bytes if trace and trace.recurrent else 0,
        need_tokens=need.tokens if need else None,
        need_seqs=need.seqs if need else None,
        block_size=backend.usual_block_size if backend else BLOCK_SIZE,
    )


def free_memory(device: torch.device) -> int:
    """Bytes that may be allocated on the device; a container's own limit counts."""
    if device.type == "cuda":  # what torch holds and nobody uses is free too
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
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
