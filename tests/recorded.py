"""A stand-in for CUDA graphs on any device: the operators of a step are noted, and done again on the same tensors. As
in a graph, whatever Python decides in between is decided once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_cb.attention.reference import ReferenceBackend, Storage
from hf_cb.models.drawing import Settings
from hf_cb.steps import Drawn


class Noting(TorchDispatchMode):
    """Notes every operator with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")  # it waits for the device
        self.calls.append((func, args, kwargs or {}, tree_leaves(out)))
        return out


class Recorded:
    """A Capture: `replays` counts."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple, dict, list[Any]]] = []
        self.replays = 0

    def record(self, work: Callable[[], Any]) -> Any:
        with Noting() as noting:
            out = work()
        self.calls = noting.calls
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, results in self.calls:
            for then, now in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(then, Tensor) and then.data_ptr() != now.data_ptr():
                    then.copy_(now)


def draw_by_hash(logits: Tensor, settings: Settings) -> Drawn:
    """A draw that may be recorded, without filters: Gumbel noise from seed, position and token (and no good one)."""
    place = (settings.seeds % 1009) * 31.7 + settings.positions * 7.3
    each = torch.arange(logits.shape[1], device=logits.device) * 12.9898
    noise = torch.sin(place.double()[:, None] + each) * 43758.5453
    gumbel = -torch.log(-torch.log((noise - noise.floor()).clamp(1e-9, 1 - 1e-9)))
    hot = settings.temperatures[:, None] > 0
    scores = torch.where(hot, logits / settings.temperatures[:, None].clamp(min=1e-6), logits.float())
    tokens = torch.where(hot, scores + gumbel, scores.double()).argmax(-1)
    logprobs = (scores.gather(1, tokens[:, None]) - scores.logsumexp(-1, keepdim=True))[:, 0].float()
    return Drawn(torch.where(logits.isnan().any(-1), -1, tokens), logprobs)


class TensorBackend(ReferenceBackend):
    """Decides nothing by a value, so that a step of it may be recorded: every row attends to its whole block table."""

    name = "tensors"

    def graph_key(self, batch: Any) -> Hashable:
        return max(batch.query_lens_list)

    def prepare(self, batch: Any, group: Any, device: torch.device) -> Any:
        return batch, group

    def attend(
        self, storage: Storage, layer: Any, q: Tensor, k: Tensor, v: Tensor, meta: Any, sinks: Tensor | None
    ) -> Tensor:
        batch, group = meta
        block, place = group.slot_mapping.clamp(min=0) // batch.block_size, group.slot_mapping % batch.block_size
        written = (group.slot_mapping >= 0)[:, None, None]
        for cache, new in ((storage.k, k), (storage.v, v)):
            cache[block, :, place] = torch.where(written, new, cache[block, :, place])
        tokens = torch.arange(len(q), device=q.device)
        row = torch.searchsorted(batch.cu_seqlens_q[1:].contiguous(), tokens, right=True)
        position = batch.seq_lens[row] - batch.cu_seqlens_q[row + 1] + tokens
        keys, values = (
            cache[group.block_table[row].long()].transpose(1, 2).flatten(2, 3) for cache in (storage.k, storage.v)
        )
        at = torch.arange(keys.shape[2], device=q.device)
        seen = at <= position[:, None]
        if layer.window is not None:
            seen &= at > position[:, None] - layer.window
        keys, values = (x.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for x in (keys, values))
        values = torch.where(seen[:, None, :, None], values, 0.0)  # a kernel does not read the others
        scores = torch.einsum("thd,thkd->thk", q, keys) * layer.scale
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        return torch.einsum("thk,thkd->thd", weights, values)
