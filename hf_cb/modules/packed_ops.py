"""Linear layers and embeddings on packed weights: what stands in for torch's own functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _len_torch_dispatch_stack as len_of_modes

from hf_cb.kernels.cpu import library as lib
from hf_cb.kernels.cpu.linear import Columns

if TYPE_CHECKING:
    from hf_cb.modules.weights import PackedWeights

_own = threading.local()  # each thread has a workspace


def _workspace() -> lib.Workspace:
    if not hasattr(_own, "workspace"):
        _own.workspace = lib.Workspace()
    return _own.workspace


def _is_plain(x: Any, weight: Tensor) -> bool:
    """Whether a product with x needs no gradient and no other type: then the packed matrix will do."""
    if type(x) is not Tensor or x.dtype != weight.dtype or x.device.type != "cpu":
        return False
    if x.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    if torch.jit.is_tracing() or torch.compiler.is_compiling() or len_of_modes() or forward_ad._current_level >= 0:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    return not torch.is_autocast_enabled("cpu")


def _packed_parts(weight: Tensor | None) -> tuple[PackedWeights | None, list[Columns]]:
    """Who has packed a weight, and into what; nothing if it is not packed, or somebody has unpacked it just now."""
    owner = None if weight is None else weight.__dict__.get("_hf_cb_packed")
    return owner, owner.columns_of(weight) if owner is not None else []


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    """F.linear; None where it is not for us."""
    if not _is_plain(input, weight) or _packed_parts(bias)[1]:
        return None
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        return None  # torch says what is wrong
    owner, parts = _packed_parts(weight)
    if owner is None or not parts:
        return None
    threads, scratch = torch.get_num_threads(), _workspace()
    found = [columns.linear(owner.table, scratch, input, threads) for columns in parts]
    out = found[0] if len(found) == 1 else torch.cat(found, dim=-1)
    return out if bias is None else out.add_(bias)


def _embedding(
    input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *others: Any, **more: Any
) -> Any:
    """F.embedding; None where it is not for us."""
    if max_norm is not None or type(input) is not Tensor or input.dtype != torch.long:
        return None
    owner, parts = _packed_parts(weight)
    if (
        owner is None
        or len(parts) != 1
        or (torch.is_grad_enabled() and weight.requires_grad)
        or input.device.type != "cpu"
    ):
        return None
    if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < weight.shape[0]:
        raise IndexError("index out of range in self")  # as torch says it
    return parts[0].embed(owner.table, input, torch.get_num_threads())


PACKED: dict[Any, Callable[..., Any]] = {F.linear: _linear, F.embedding: _embedding}
