"""What must stay as it is for packed layers to compute what the model computes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hf_cb.modules.recipe import ModelRecipe

# transformers' own, which change no value: outputs are recorded where a forward is asked for them, and inputs are made
# to require gradients (for checkpointed layers, in training)
_HARMLESS_HOOKS = ("install_output_capuring_hook.", "make_inputs_require_grad")


def effective(hooks: Iterable[dict[int, Any]]) -> Iterator[Any]:
    """The hooks of these that may change what a module computes, or want to see it."""
    for hook in itertools.chain.from_iterable(found.values() for found in hooks if found):
        if not any(name in getattr(hook, "__qualname__", "") for name in _HARMLESS_HOOKS):
            yield hook


class Places:
    """Where a model's weights and buffers lie, and which adapters are active: what a recorded step has for good, and
    what a `Guard` of modules does not see."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[tuple[Any, str, Any]] = []
        self._adapters: list[tuple[dict[str, Any], list[str]]] = []
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                self._tensors += [(tensors, name, t) for name, t in tensors.items() if t is not None]
            if "_active_adapter" in module.__dict__:
                self._adapters.append((module.__dict__, adapters_of(module.__dict__)))
        every = [tensor for _, _, tensor in self._tensors]
        self._addresses = [tensor.data_ptr() for tensor in every]
        # a quantised weight may be a wrapper that owns no memory
        self._inside = [(tensor, _addresses(tensor)) for tensor in every if hasattr(tensor, "__tensor_flatten__")]

    def are_same(self) -> bool:
        """Asked at every step."""
        for (tensors, name, tensor), address in zip(self._tensors, self._addresses, strict=True):
            if tensors.get(name) is not tensor or tensor.data_ptr() != address:
                return False
        return all(_addresses(t) == then for t, then in self._inside) and all(
            adapters_of(attributes) == then for attributes, then in self._adapters
        )


def _addresses(tensor: Tensor) -> list[int]:
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.data_ptr()]
    inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [address for t in inside if isinstance(t, Tensor) for address in _addresses(t)]


def adapters_of(attributes: dict[str, Any]) -> list[str]:
    """Of a layer of PEFT, by its `__dict__`: adapters are switched without touching a parameter."""
    return [repr(attributes.get(n)) for n in ("_active_adapter", "_disable_adapters", "scaling", "merged_adapters")]


class Guard:
    """Notes a model's modules, and for whole layers (`recipe`) also hooks, weights and what was copied of them.

    The model itself is held weakly: what lies in its `__dict__` may hold it.
    """

    def __init__(self, model: nn.Module, recipe: ModelRecipe | None = None) -> None:
        self._model = weakref.ref(model)
        modules = [m for m in model.modules() if m is not model]
        self._top = dict(model._modules)
        self._places = [(m._modules, dict(m._modules)) for m in modules if m._modules]
        self._hooks = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)]
        self._attributes = [m.__dict__ for m in modules]
        self._classes = [(m, type(m)) for m in modules]
        self._forwards = [(cls, cls.forward) for cls in {type(m) for m in model.modules()}]
        self._whole = recipe is not None
        self._copied: list[tuple[dict[str, Any], str]] = []
        self._values: list[Tensor | None] = []
        self._weights: list[tuple[dict[str, Any], nn.Parameter]] = []
        if recipe is None:
            return
        norms = [norm.module for layer in recipe.layers for norm in layer.norms()] + [recipe.final_norm.module]
        linears = [linear for layer in recipe.layers for linear in layer.linears()] + [recipe.head]
        self._copied = [(norm._parameters, name) for norm in norms for name in ("weight", "bias")]
        self._copied += [(linear._parameters, "bias") for linear in linears]
        rotary = {layer.rotary.module for layer in recipe.layers if layer.rotary is not None}
        self._copied += [(module._buffers, name) for module in rotary for name in module._buffers]
        if not recipe.tied:
            self._copied.append((recipe.embedding._parameters, "weight"))
        self._weights = [(module._parameters, module.weight) for module in [*linears, recipe.embedding]]

    def versions(self) -> list[Any]:
        """Moves when a parameter that was copied is written to or replaced."""
        found = [tensors.get(name) for tensors, name in self._copied]
        return [None if t is None else (t.data_ptr(), -1 if t.is_inference() else t._version) for t in found]

    def note_values(self) -> None:
        """What was copied, as it is now."""
        self._values = [None if t is None else t.detach().clone() for t in self._small()]

    def same_values(self) -> bool:
        """Whether what was copied is still the same: a write through `.data` moves no version."""
        return len(self._values) == len(self._small()) and all(
            (now is None) == (then is None) and (now is None or then is None or torch.equal(now, then))
            for now, then in zip(self._small(), self._values, strict=True)
        )

    def _small(self) -> list[Tensor | None]:
        found = [tensors.get(name) for tensors, name in self._copied]
        return [None if t is None or t.dim() > 1 else t for t in found]

    def same_modules(self) -> bool:
        model = self._model()
        return model is not None and model._modules == self._top and all(now == then for now, then in self._places)

    def has_hooks(self) -> bool:
        """Also a forward that somebody has put on a module."""
        model = self._model()
        if model is None or "forward" in model.__dict__:
            return True
        everywhere = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        hooks = (*everywhere, model._forward_hooks, model._forward_pre_hooks, *self._hooks)
        if next(effective(hooks), None) is not None:
            return True
        return any("forward" in attributes for attributes in self._attributes)

    def _same_classes(self) -> bool:
        if any(cls.forward is not forward for cls, forward in self._forwards):
            return False
        return all(module.__class__ is cls for module, cls in self._classes)

    def is_intact(self) -> bool:
        """No module or weight was replaced; for whole layers also: no hook is set."""
        if not self.same_modules() or (self._whole and (self.has_hooks() or not self._same_classes())):
            return False
        return all(parameters.get("weight") is weight for parameters, weight in self._weights)
