"""What a step takes in memory beside the weights and the KV cache, found by running the largest one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_cb.attention.interception import AttentionCall, Drive, stepping
from hf_cb.models.device import device_of, turn
from hf_cb.models.rope import rotary_by_length

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

logger = logging.getLogger("hf_cb")

# On some devices, what is the most that was allocated inside, beyond what was before: filled in at the end
Meter = Callable[[Iterable[torch.device]], AbstractContextManager[Counter[torch.device]]]


@dataclass
class _Idle:
    """A step that attends to nothing: what attention itself allocates is small."""

    drives: Mapping[int, Drive] = field(default_factory=dict)
    driven: set[int] = field(default_factory=set)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, sinks: Tensor | None
    ) -> Tensor:
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


@contextmanager
def cuda_meter(devices: Iterable[torch.device]) -> Iterator[Counter[torch.device]]:
    """By PyTorch's own count of the memory that its tensors take."""
    found: Counter[torch.device] = Counter()
    on = [d for d in devices if d.type == "cuda"]
    for device in on:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = [torch.cuda.memory_allocated(device) for device in on]
    yield found
    for device, start in zip(on, before, strict=True):
        found[device] = torch.cuda.max_memory_allocated(device) - start


@torch.no_grad()
def working_bytes(
    model: PreTrainedModel, num_tokens: int, num_rows: int, meter: Meter = cuda_meter
) -> Counter[torch.device]:
    """Bytes on each device that a step of `num_tokens`, with logits for `num_rows`, takes at its peak; nothing for
    devices that `meter` does not know. A step that does not fit at all is reported and counts as nothing: the engine
    makes it smaller when it comes."""
    devices = {p.device for p in model.parameters()} | {device_of(model)}
    device = device_of(model)
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device)[None]
    rows = positions[0, : min(num_rows, num_tokens)]
    wanted = {"logits_to_keep": rows} if model._supports_logits_to_keep() else {}
    rotary = rotary_by_length(model)
    step = _Idle(drives={id(m): lambda forward, args, kwargs: forward(*args, **kwargs) for m in rotary})
    try:
        with meter(devices) as found, turn(model), stepping(step, rotary):
            out = model(input_ids=ids, position_ids=positions, use_cache=False, **wanted)
            (out.logits[0] if wanted else out.logits[0, rows]).float()  # as the sampler does
    except torch.OutOfMemoryError:
        logger.warning("A step of %d tokens does not fit in memory: set max_batch_tokens lower.", num_tokens)
        return Counter()
    return found
