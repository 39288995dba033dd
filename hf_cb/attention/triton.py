"""The `triton` backend: our own Triton kernels (`hf_cb.kernels.triton`), on CUDA, ROCm and XPU.

On a CPU they run in Triton's interpreter, far too slowly for more than tests: by name only, and only where
TRITON_INTERPRET=1 was set before Triton was imported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_cb.attention.pages import MOST_DIM, Meta, PagesBackend, Storage, store, uneven_heads, with_rows
from hf_cb.attention.trial import failure
from hf_cb.errors import install

if TYPE_CHECKING:
    from torch import Tensor

    from hf_cb.steps import LayerFacts

OLDEST = (3, 6)
DEVICE_TYPES = frozenset({"cuda", "xpu"})


class TritonBackend(PagesBackend):
    """See the module's docstring; the methods are those of `AttentionBackend`. Any block size will do.

    `kv_dtype`: "fp8" keeps keys and values in e4m3 (without scales, as vLLM's default), None in the layers' own dtype.
    """

    name = "triton"
    device_types: frozenset[str] | None = DEVICE_TYPES

    def __init__(self, kv_dtype: str | None = None) -> None:
        self.kv_dtype = kv_dtype

    def kept_in(self, layer: LayerFacts) -> torch.dtype:
        return torch.float8_e4m3fn if self.kv_dtype == "fp8" else layer.dtype

    def missing(self) -> str | None:
        if problem := package_problem():
            return problem
        if not (torch.cuda.is_available() or torch.xpu.is_available() or interpreted()):
            return "there is no CUDA, ROCm or XPU device (TRITON_INTERPRET=1 runs it on a CPU, for tests)"
        return None

    def unsupported(self, layer: LayerFacts) -> str | None:
        problem = device_problem(layer.device)
        if problem is not None:
            return problem
        if layer.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the kernels know float32, bfloat16 and float16, not {layer.dtype}"
        widest = max(layer.head_dim, layer.v_head_dim)
        if widest > MOST_DIM:
            return f"a head of {widest} is larger than {MOST_DIM}"
        if layer.num_heads % layer.num_kv_heads:
            return uneven_heads(layer)
        if layer.scale <= 0:
            return f"a scale of {layer.scale} is not above zero"
        return failure(self, layer, self.kept_in(layer))

    def attend(
        self, storage: Storage, layer: LayerFacts, q: Tensor, k: Tensor, v: Tensor, meta: Meta, sinks: Tensor | None
    ) -> Tensor:
        kernels().store_kv(with_rows(k), with_rows(v), storage.k, storage.v, meta.slot_mapping)
        return self.attend_stored(storage, layer, with_rows(q), meta, sinks)

    def attend_stored(
        self, storage: Storage, layer: LayerFacts, q: Tensor, meta: Meta, sinks: Tensor | None = None
    ) -> Tensor:
        """The second half of `attend`: keys and values are in the cache already."""
        return kernels().paged_attention(
            q,
            storage.k,
            storage.v,
            meta.block_table,
            meta.cu_seqlens_q,
            meta.seq_lens,
            meta.max_seqlen_q,
            layer.scale,
            window=layer.window,
            chunk=layer.chunk,
            softcap=layer.softcap or None,
            sinks=sinks,
        )


@dataclass(frozen=True)
class Kernels:
    store_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]


@functools.cache
def kernels() -> Kernels:
    from hf_cb.kernels.triton.kv_store import store_kv
    from hf_cb.kernels.triton.paged_attention import paged_attention

    return Kernels(store_kv, paged_attention)


def write(storage: Storage, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """For any backend with pages: by our kernel where there is Triton, and else by PyTorch."""
    if _stores(storage.k.device):
        kernels().store_kv(with_rows(k), with_rows(v), storage.k, storage.v, slot_mapping)
    else:
        store(storage, k, v, slot_mapping)


@functools.cache
def _stores(device: torch.device) -> bool:
    return device.type != "cpu" and package_problem() is None and device_problem(device) is None


@functools.cache
def package_problem() -> str | None:
    """Why there is no Triton that will do, or None. (PyTorch's builds for ROCm and XPU bring it by other names.)"""
    try:
        import triton

        version: str = triton.__version__
    except (ModuleNotFoundError, AttributeError):  # without a version it is some folder of that name
        return f"triton is not installed ({install('gpu')})"
    except Exception as error:  # a build for another system
        return f"triton cannot be imported: {type(error).__name__}: {error}"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        return f"triton {version} is older than {'.'.join(map(str, OLDEST))} ({install('gpu')})"
    return None


def device_problem(device: torch.device) -> str | None:
    """Why our Triton kernels, where Triton is installed, do not run there; None if they do."""
    if device.type == "cpu":
        return None if interpreted() else "it computes on cpu, where Triton runs only with TRITON_INTERPRET=1"
    if device.type not in DEVICE_TYPES:
        return f"it computes on {device}"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"compute capability {major}.{minor} is below 8.0"
    return None


def interpreted() -> bool:
    """Whether kernels run in the interpreter. That is settled when a function is defined, Triton's own included."""
    if package_problem() is not None:
        return False
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    return not isinstance(tl.cdiv, JITFunction)
