"""The `torch_varlen` backend: the FlashAttention that comes with PyTorch, by `torch.nn.attention.varlen`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hf_cb.attention.pages import Meta, PagesBackend, Storage, problem_of_flash, with_rows
from hf_cb.attention.trial import failure
from hf_cb.attention.triton import write

if TYPE_CHECKING:
    from torch import Tensor

    from hf_cb.steps import LayerFacts

NEEDS = frozenset({"scale", "window_size", "enable_gqa", "seqused_k", "block_table"})


class TorchVarlenBackend(PagesBackend):
    """See the module's docstring; the methods are those of `AttentionBackend`."""

    name = "torch_varlen"
    block_multiple = 256  # it is FlashAttention 2
    usual_block_size = 256
    sums_lengths = True  # FlashAttention 2 takes the lengths in both forms

    def __init__(self) -> None:
        self.varlen_attn, self.problem = installed()

    def missing(self) -> str | None:
        return self.problem

    def unsupported(self, layer: LayerFacts) -> str | None:
        problem = problem_of_flash(layer)
        if problem is not None:
            return problem
        if layer.softcap:
            return "torch's varlen_attn has no softcap"
        if torch.cuda.get_device_capability(layer.device) < (8, 0):
            return "torch's varlen_attn needs compute capability 8.0"
        return failure(self, layer)

    def attend(
        self, storage: Storage, layer: LayerFacts, q: Tensor, k: Tensor, v: Tensor, meta: Meta, sinks: Tensor | None
    ) -> Tensor:
        assert self.varlen_attn is not None and sinks is None
        write(storage, k, v, meta.slot_mapping)
        out: Tensor = self.varlen_attn(
            with_rows(q),
            storage.k,
            storage.v,
            meta.cu_seqlens_q,
            meta.cu_seqlens_k,
            meta.max_seqlen_q,
            meta.max_seqlen_k,
            scale=layer.scale,
            window_size=(-1, 0) if layer.window is None else (layer.window - 1, 0),  # keys before and after
            enable_gqa=layer.num_heads != layer.num_kv_heads,
            seqused_k=meta.seq_lens,
            block_table=meta.block_table,
        )
        return out


@functools.cache
def installed() -> tuple[Callable[..., Any] | None, str | None]:
    """torch's function, or None and what is missing."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, f"torch {torch.__version__} has no varlen_attn"
    lacking = NEEDS - frozenset(inspect.signature(varlen_attn).parameters)
    if lacking:
        return None, f"varlen_attn of torch {torch.__version__} has no {', '.join(sorted(lacking))}"
    if not torch.cuda.is_available():
        return varlen_attn, "there is no CUDA device"
    if torch.version.hip is not None:
        return varlen_attn, "it is used on NVIDIA's GPUs only"
    return varlen_attn, None
