"""Every "auto" of the options becomes a value, once, with its reason: `ResolvedConfig` is what the engine runs on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_cb.config import EngineConfig, parse_bytes
from hf_cb.errors import OptionError

BLOCK_SIZE = 32  # tokens: little waste at a request's end, long enough rows to gather


@dataclass(frozen=True)
class ResolvedConfig:
    """An EngineConfig with nothing left open. `reasons` says for every "auto" why it became what it is."""

    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    prefill_chunk: int
    prefix_caching: bool
    overlap: bool
    cuda_graphs: bool
    host_blocks: int
    most_rows: int  # that all work can fill a decode step with
    trace_steps: int
    itl_target: float | None = None
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Surroundings:
    """What the "auto" values depend on. `block_bytes` maps a block size to the bytes of one KV block."""

    model_len: int
    free_bytes: int
    device_type: str
    block_bytes: Any
    num_groups: int = 1
    state_bytes: int = 0  # of one request's recurrent state, beside its blocks
    need_tokens: int | None = None  # KV tokens that all requests together can use, if they are known
    need_seqs: int | None = None
    block_size: int = BLOCK_SIZE  # the attention backend's usual one

    @property
    def row_bytes(self) -> int:
        """Of a request's recurrent states: its own, and its row in the batch of those that decode."""
        return 2 * self.state_bytes


USUAL_TOKENS, USUAL_SEQS = 8192, 256  # of a step on a GPU
CPU_KV_CAP = 4 * 2**30  # a library in somebody's notebook does not fill the machine; kv_budget asks for more


def resolve(config: EngineConfig, around: Surroundings) -> ResolvedConfig:
    """Replaces every None by a value, once.

    Raises:
        OptionError: the memory does not hold one block.
    """
    why: dict[str, str] = {}

    def auto(name: str, value: Any, reason: str) -> Any:
        given = getattr(config, name)
        if given is not None:
            why[name] = "given"
            return given
        why[name] = reason
        return value

    on_cpu = around.device_type == "cpu"
    block_size = auto("block_size", around.block_size, "usual for the attention backend")
    max_model_len = auto("max_model_len", around.model_len, "the model's positions")
    fraction = config.max_memory_fraction
    fraction = (0.3 if on_cpu else 0.85) if fraction is None else fraction
    room = int(around.free_bytes * fraction)
    if on_cpu and config.max_memory_fraction is None:
        room = min(room, CPU_KV_CAP)
    usual_seqs, why_seqs = 64 if on_cpu else USUAL_SEQS, f"usual on {around.device_type}"
    if usual_seqs * around.row_bytes > room // 2:
        usual_seqs = max(1, room // 2 // around.row_bytes)
        why_seqs = f"recurrent states of {around.state_bytes} bytes may take half of {room / 2**30:.2f} GiB"
    max_num_seqs = auto("max_num_seqs", usual_seqs, why_seqs)
    max_batch_tokens = auto("max_batch_tokens", 512 if on_cpu else USUAL_TOKENS, f"usual on {around.device_type}")
    prefill_chunk = auto("prefill_chunk", max_batch_tokens, "a prompt may use the whole step")
    seqs = max_num_seqs if around.need_seqs is None else min(max_num_seqs, around.need_seqs)
    # a block of slack for each request, since the last one is rarely full, and for a copy on write
    need_tokens = seqs * max_model_len if around.need_tokens is None else around.need_tokens
    need = around.num_groups * (-(-need_tokens // block_size) + 2 * (around.need_seqs or seqs))
    per_block = around.block_bytes(block_size)
    num_blocks, why["num_blocks"] = _num_blocks(config, around, room, fraction, seqs, per_block, need)
    if num_blocks < around.num_groups:
        raise OptionError(
            f"The KV cache would have {num_blocks} blocks and needs at least {around.num_groups} (one for each layer "
            f"group; a block of {block_size} tokens takes {per_block} bytes): raise kv_budget or num_blocks, or free "
            f"memory."
        )
    _check_device(config, around)
    return ResolvedConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        prefill_chunk=min(prefill_chunk, max_batch_tokens),
        prefix_caching=config.prefix_caching,
        overlap=auto("overlap", not on_cpu, f"usual on {around.device_type}"),
        host_blocks=parse_bytes(config.cpu_offload_space) // per_block if config.cpu_offload_space else 0,
        cuda_graphs=auto("cuda_graphs", around.device_type == "cuda", f"usual on {around.device_type}"),
        most_rows=seqs,
        trace_steps=config.trace_steps,
        itl_target=config.itl_target,
        reasons=why,
    )


def _num_blocks(
    config: EngineConfig, around: Surroundings, room: int, fraction: float, seqs: int, per_block: int, need: int
) -> tuple[int, str]:
    """How many KV blocks there are, and why: as told, or what is needed of the `room`, in bytes, that may be used."""
    if config.num_blocks is not None:
        return config.num_blocks, "given"
    if config.kv_budget is not None:
        why = f"kv_budget={config.kv_budget} bytes at {per_block} bytes a block"
        return int(parse_bytes(config.kv_budget) // per_block), why
    states = seqs * around.row_bytes
    if states > 0.9 * room:
        raise OptionError(
            f"The recurrent states of {seqs} requests take {states / 2**30:.1f} GiB, and "
            f"{room / 2**30:.1f} GiB may be used: lower max_num_seqs, or raise max_memory_fraction."
        )
    room -= states
    why = (
        f"{fraction:.0%} of {around.free_bytes / 2**30:.1f} GiB free, at most {room / 2**30:.2f} GiB, "
        f"{per_block} bytes a block; all requests together need at most {need}"
    )
    return int(min(need, room // per_block)), why


def _check_device(config: EngineConfig, around: Surroundings) -> None:
    """Raises OptionError for what the model's device does not have."""
    if config.cuda_graphs and around.device_type != "cuda":
        raise OptionError(f"cuda_graphs=True needs a model on CUDA, and this one is on {around.device_type}: leave it.")
    if config.cpu_offload_space and around.device_type == "cpu":
        raise OptionError("cpu_offload_space is for a model on a GPU: this one's KV cache is in the host's memory.")
    if config.cpu_offload_space and around.state_bytes:
        raise OptionError(
            "cpu_offload_space keeps the KV blocks of requests that give way, and this model has layers with a state "
            "besides: such requests are computed again. Leave it unset."
        )
