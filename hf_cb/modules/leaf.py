"""Linear layers on packed weights, one by one, for models whose layers are not understood as a whole."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from hf_cb.kernels.cpu import library as lib
from hf_cb.kernels.cpu.linear import side_by_side
from hf_cb.modules.recognise import is_plain_linear
from hf_cb.modules.weights import PackedWeights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack_linears(
    model: nn.Module, table: lib.Table, threads: int, but: Collection[nn.Parameter] = ()
) -> PackedWeights | None:
    """Packs the weight of every plain linear layer that no adapter has to do with; None if there is none.

    Args:
        but: parameters to leave alone; compared by identity.

    Raises:
        WeightsInUse: another thread is in a forward of the model; nothing is changed then.
    """
    found = {id(linear.weight): linear.weight for linear in _linears(model)}  # layers may share one
    for parameter in but:
        found.pop(id(parameter), None)
    chosen = [w for w in found.values() if w.dtype in DTYPES and w.is_contiguous()]
    if not chosen:
        return None
    weights = PackedWeights(table, threads)
    with weights.packing(model, chosen):
        for weight in chosen:
            weights.take(weight, side_by_side([weight.shape[0]], weight.shape[1], weight.dtype))
    return weights


def _linears(module: nn.Module) -> list[nn.Linear]:
    if hasattr(module, "base_layer"):  # an adapter's: it may be trained, merged or switched at any time
        return []
    if is_plain_linear(module) and module.weight.device.type == "cpu":
        assert isinstance(module, nn.Linear)
        return [module]
    return [linear for child in module.children() for linear in _linears(child)]
