"""The `flash` backend: FlashAttention 2, 3 or 4, whichever is installed and made for the GPU (NVIDIA's only)."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_cb.attention.pages import Meta, PagesBackend, Storage, problem_of_flash, with_rows
from hf_cb.attention.trial import failure
from hf_cb.attention.triton import write
from hf_cb.errors import install
from hf_cb.kernels.device import on
from hf_cb.sizes import BLOCK_SIZE

if TYPE_CHECKING:
    from torch import Tensor

    from hf_cb.steps import LayerFacts


@dataclass(frozen=True)
class Generation:
    """How one generation of FlashAttention is found and called.

    `majors`: compute capabilities that its paged kernels are made for. `needs`: arguments without which the installed
    version is too old. `clears`: it may read values past a request's length, with weight zero, and 0 * NaN is NaN.
    """

    number: int
    module: str
    function: str
    majors: range
    needs: frozenset[str]
    block_multiple: int = 1
    usual_block_size: int = BLOCK_SIZE
    clears: bool = False


GENERATIONS = (
    Generation(
        3,
        "flash_attn_interface",
        "flash_attn_with_kvcache",
        range(9, 10),
        frozenset({"cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "window_size"}),
        clears=True,
    ),
    Generation(
        4,
        "flash_attn.cute",
        "flash_attn_varlen_func",
        range(9, 12),
        frozenset({"cu_seqlens_q", "seqused_k", "page_table", "window_size"}),
        usual_block_size=128,  # its key tile, which it then fetches as a whole
        clears=True,
    ),
    Generation(
        2,
        "flash_attn",
        "flash_attn_varlen_func",
        range(8, 13),
        frozenset({"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_table", "window_size"}),
        block_multiple=256,
        usual_block_size=256,
    ),
)


@dataclass(frozen=True)
class Flash:
    """An installed FlashAttention: its function, and the names of that function's arguments."""

    generation: Generation
    function: Callable[..., Any]
    arguments: frozenset[str]

    def attend(self, layer: LayerFacts, q: Tensor, cache: Storage, meta: Meta) -> Tensor:
        """Keys are seen from `window - 1` before a query's own position, which is aligned to the end of its request."""
        number = self.generation.number
        everything = None if number == 4 else -1
        options: dict[str, Any] = dict(
            softmax_scale=layer.scale,
            causal=True,
            window_size=(everything, everything) if layer.window is None else (layer.window - 1, 0),
        )
        if layer.softcap:
            options["softcap"] = layer.softcap
        given = dict(
            cu_seqlens_q=meta.cu_seqlens_q,
            max_seqlen_q=meta.max_seqlen_q,
            max_seqlen_k=meta.max_seqlen_k,
        )
        if number == 2:
            given |= dict(cu_seqlens_k=meta.cu_seqlens_k, block_table=meta.block_table)
        elif number == 3:
            del given["max_seqlen_k"]
            given |= dict(cache_seqlens=meta.seq_lens, page_table=meta.block_table)
        else:
            given |= dict(seqused_k=meta.seq_lens, page_table=meta.block_table)
            given = {name: value for name, value in given.items() if name in self.arguments}
        with on(q.device):  # generation 4 takes the current device's stream
            out = self.function(q, cache.k, cache.v, **given, **options)
        return out[0] if isinstance(out, tuple) else out


class FlashBackend(PagesBackend):
    """See the module's docstring; the methods are those of `AttentionBackend`."""

    name = "flash"

    def __init__(self) -> None:
        self.flash, self.problem = installed()
        generation = self.flash.generation if self.flash is not None else GENERATIONS[-1]
        self.block_multiple = generation.block_multiple
        self.usual_block_size = generation.usual_block_size
        self.clears = generation.clears
        self.sums_lengths = generation.number == 2

    def missing(self) -> str | None:
        return self.problem

    def unsupported(self, layer: LayerFacts) -> str | None:
        assert self.flash is not None
        problem = problem_of_flash(layer)
        if problem is not None:
            return problem
        if layer.softcap and "softcap" not in self.flash.arguments:
            return f"{self.flash.generation.module}.{self.flash.generation.function} has no softcap: update it"
        return failure(self, layer)

    def attend(
        self, storage: Storage, layer: LayerFacts, q: Tensor, k: Tensor, v: Tensor, meta: Meta, sinks: Tensor | None
    ) -> Tensor:
        assert sinks is None
        write(storage, k, v, meta.slot_mapping)
        return self.attend_stored(storage, layer, with_rows(q), meta)

    def attend_stored(self, storage: Storage, layer: LayerFacts, q: Tensor, meta: Meta) -> Tensor:
        """The second half of `attend`: keys and values are in the cache already."""
        assert self.flash is not None
        return self.flash.attend(layer, q, storage, meta)

    def clear_blocks(self, storage: Storage, blocks: Tensor) -> None:
        if self.clears:
            storage.v.index_fill_(0, blocks.to(storage.v.device), 0)


@functools.cache
def installed() -> tuple[Flash | None, str | None]:
    """The FlashAttention to use on this machine's GPU, or None and why there is none."""
    if not torch.cuda.is_available():
        return None, "there is no CUDA device"
    if torch.version.hip is not None:
        return None, "it is used on NVIDIA's GPUs only"
    major, minor = torch.cuda.get_device_capability()
    fitting = [generation for generation in GENERATIONS if major in generation.majors]
    if not fitting:
        return None, f"no version of it is made for compute capability {major}.{minor}"
    return find(fitting)


def find(generations: Sequence[Generation]) -> tuple[Flash | None, str | None]:
    """The first of these that is installed and recent enough."""
    problems: list[str] = []
    for generation in generations:
        try:
            function = getattr(importlib.import_module(generation.module), generation.function)
        except AttributeError:  # `flash_attn` is only the folder that generation 4 lies in
            continue
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and f"{generation.module}.".startswith(f"{error.name}."):
                continue
            problems.append(f"{generation.module} cannot be imported: {type(error).__name__}: {error}")
            continue
        arguments = frozenset(inspect.signature(function).parameters)
        lacking = generation.needs - arguments
        if not lacking:
            return Flash(generation, function, arguments), None
        problems.append(f"{generation.module}.{generation.function} has no {', '.join(sorted(lacking))}: update it")
    return None, "; ".join(problems) or f"flash-attn is not installed ({install('flash')})"
