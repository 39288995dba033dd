"""Linear layers with the same input as one product, on the memory of their own parameters.

Their weights are moved into one matrix, one after the other, and each parameter becomes a view of its rows: the same
object with its shape, dtype, device and values, in the same amount of memory. A write to a parameter is a write to the
matrix, so optimisers, `load_state_dict` and `generate` need no care; what takes a parameter elsewhere (`.to()`,
`parameter.data = ...`) leaves the matrix behind, and that shows in where the parameter lies. `torch.save` of one such
parameter alone, and plain `pickle`, write the whole matrix, as they do of any view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class _Together:
    """Parameters that lie one after the other, the modules that they belong to, and the tensor that spans them."""

    name: str
    modules: list[nn.Linear]
    parameters: list[nn.Parameter]
    whole: Tensor

    def is_current(self) -> bool:
        """Whether they are what the modules have, and lie where they were put."""
        at = self.whole.data_ptr()
        for module, parameter in zip(self.modules, self.parameters, strict=True):
            if module._parameters.get(self.name) is not parameter or parameter.data_ptr() != at:
                return False
            at += parameter.nbytes
        return True

    def part(self) -> None:
        """Each parameter that still lies here gets memory of its own."""
        at = self.whole.data_ptr()
        for parameter in self.parameters:
            here, at = parameter.data_ptr() == at, at + parameter.nbytes
            if here:
                parameter.data = parameter.data.clone()


class Product:
    """`x @ weight.T + bias` of some linear layers, their results side by side: one product once it is merged."""

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self.modules = list(dict.fromkeys(modules))
        self._merged: list[_Together] = []

    def __call__(self, x: Tensor) -> Tensor:
        if self._merged:
            return F.linear(x, *(together.whole for together in self._merged))
        results = [F.linear(x, module.weight, module.bias) for module in self.modules]
        return results[0] if len(results) == 1 else torch.cat(results, -1)

    def is_current(self) -> bool:
        """Whether it gives what the layers' parameters give now. What is not merged reads the parameters themselves."""
        return all(together.is_current() for together in self._merged)

    def part(self) -> None:
        """Takes `merge` back."""
        merged, self._merged = self._merged, []
        for together in merged:
            together.part()

    def parameters(self) -> list[list[nn.Parameter]]:
        """What is to lie together: weights, and biases if there are any; nothing if there is nothing to merge."""
        biased = [module.bias is not None for module in self.modules]
        if len(biased) == 1 or any(biased) != all(biased):
            return []
        return [[getattr(module, name) for module in self.modules] for name in ("weight", "bias")[: 1 + biased[0]]]

    def _merge(self) -> None:
        found = self.parameters()
        wholes = [_adjacent(parameters) for parameters in found]
        wholes = [
            _moved(parameters) if whole is None else whole for parameters, whole in zip(found, wholes, strict=True)
        ]
        names = ("weight", "bias")[: len(found)]
        self._merged = [_Together(n, self.modules, p, w) for n, p, w in zip(names, found, wholes, strict=True)]


def merge(products: Sequence[Product], model: nn.Module) -> None:
    """Merges what is not, or not any more. Products stay apart where layers share a parameter, or something else lies
    in a parameter's memory or may: then it would no longer be the same memory.

    Raises:
        torch.OutOfMemoryError: what was merged stays so, and all parameters have their values.
    """
    for product in products:
        if not product.is_current():
            product.part()  # what has stayed behind
    owners = Counter(id(p) for product in products for group in product.parameters() for p in group)
    tenants = Counter(_storage(p) for p in model.parameters())
    for product in products:
        if product._merged:
            continue
        groups = product.parameters()
        if any(owners[id(p)] > 1 or not p.is_contiguous() for group in groups for p in group):
            continue
        free = (tenants[_storage(p)] == 1 and p.untyped_storage().nbytes() == p.nbytes for g in groups for p in g)
        if groups and (all(_adjacent(group) is not None for group in groups) or all(free)):
            product._merge()


def _storage(parameter: nn.Parameter) -> int:
    return parameter.untyped_storage().data_ptr()


def _adjacent(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """The tensor that spans them, if they lie one after the other already: in a copy of a merged model, for example."""
    first = parameters[0]
    for before, after in pairwise(parameters):
        if _storage(before) != _storage(after) or after.data_ptr() != before.data_ptr() + before.nbytes:
            return None
    rows = sum(len(p) for p in parameters)
    return first.data.as_strided((rows, *first.shape[1:]), first.stride())


def _moved(parameters: Sequence[nn.Parameter]) -> Tensor:
    first = parameters[0]
    rows = [len(p) for p in parameters]
    whole = torch.empty(sum(rows), *first.shape[1:], dtype=first.dtype, device=first.device)
    parts = whole.split(rows)
    for parameter, part in zip(parameters, parts, strict=True):
        part.copy_(parameter.data)
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole
