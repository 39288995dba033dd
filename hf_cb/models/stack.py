"""A model whose layers were all recognised: a step is one native call, and the weights live in packed matrices.

The call is made where nothing stands in its way: no hook, no module replaced, no weight unpacked. Any other step goes
through the model's own modules, on the same KV cache.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hf_cb.attention.cpu import CpuBackend
from hf_cb.core import StepBatch
from hf_cb.models.paged import PagedModel
from hf_cb.models.reading import Reading, read_decoder
from hf_cb.modules.decoder import Decoder, Place
from hf_cb.modules.recipe import ModelRecipe
from hf_cb.modules.recognise import NotRecognised
from hf_cb.modules.weights import PackedWeights

logger = logging.getLogger("hf_cb")

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # of logits, relative to the largest
PACK_AGAIN_S = 1.0  # after somebody has looked at the weights: they may look again


class StackModel(PagedModel):
    """A PagedModel that `use_stack` was called on."""

    _decoder: Decoder | None = None
    _weights: PackedWeights | None = None
    why_not: str | None = None

    @torch.no_grad()
    def use_stack(self) -> None:
        """Reads the model's decoder and packs it; where that fails, `why_not` says why, and nothing is changed."""
        self._unpacked_at = 0.0
        try:
            reading = read_decoder(self)
            self._recipe = reading.recipe
            self._watched = _Watch(self.model, reading.recipe)
            self._pack()
            self._verify(reading)
        except NotRecognised as reason:
            self._drop()
            self.why_not = str(reason)
            logger.info("%s keeps its own layers: %s", type(self.model).__name__, reason)

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> Tensor:
        if self._decoder is None or not self._is_free():
            return super().forward(batch)
        self._prepare_blocks(batch)
        with self._turn:
            return self._decoder.best(batch) if batch.best_is_enough else self._decoder.logits(batch)

    def weights_key(self) -> object:
        if self._decoder is None and self.why_not is None and time.monotonic() > self._unpacked_at + PACK_AGAIN_S:
            self.pack()
        return super().weights_key()

    def pack(self) -> None:
        """Packs the weights again after they were unpacked; harmless otherwise."""
        if self.why_not is None and (self._decoder is None or not self._is_current()) and self._watched.is_intact():
            self._drop()
            self._pack()

    def unpack(self) -> None:
        """Gives every weight back to its Parameter, bit for bit."""
        self._drop()

    def _is_free(self) -> bool:
        """Whether this step may be the native call."""
        if not self._is_current():
            self._drop()
            return False
        return self._watched.is_intact()

    def _is_current(self) -> bool:
        return self._weights is not None and not self._weights.unpacked and self._copied == self._watched.versions()

    def _pack(self) -> None:
        assert isinstance(self.backend, CpuBackend) and self.backend.table is not None
        threads = torch.get_num_threads()
        self._weights = PackedWeights(self.backend.table, threads)
        places = [Place(*self.place(i)) for i in range(len(self._recipe.layers))]
        try:
            self._decoder = Decoder(
                self._recipe.layers, places, self.backend.table, self._weights, self._recipe, threads
            )
        except BaseException:
            self._drop()
            raise
        self._copied = self._watched.versions()

    def _drop(self) -> None:
        if self._weights is not None:
            self._weights.unpack()
        self._weights = self._decoder = None
        self._unpacked_at = time.monotonic()

    def _verify(self, reading: Reading) -> None:
        assert self._decoder is not None
        got, want = self._decoder.logits(reading.batch), reading.logits
        off = float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
        if not off <= TOLERANCE[self._decoder.dtype]:
            raise NotRecognised(f"the logits of the whole are off by {off:.1g} times the largest one")


class _Watch:
    """What must stay as it is for the native call to compute what the model computes."""

    def __init__(self, model: nn.Module, recipe: ModelRecipe) -> None:
        modules = list(model.modules())
        self._hooks = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)]
        self._places = [(m._modules, dict(m._modules)) for m in modules if m._modules]
        self._attributes = [m.__dict__ for m in modules]
        norms = [norm for layer in recipe.layers for norm in layer.norms()] + [recipe.final_norm]
        linears = [linear for layer in recipe.layers for linear in layer.linears()] + [recipe.head]
        copied = [norm.module.weight for norm in norms]
        copied += [getattr(norm.module, "bias", None) for norm in norms] + [linear.bias for linear in linears]
        if not recipe.tied:
            copied.append(recipe.embedding.weight)
        self._copied = [parameter for parameter in copied if parameter is not None]

    def versions(self) -> list[Any]:
        """Moves when a parameter that was copied is written to."""
        return [(p.data_ptr(), p._version) for p in self._copied]

    def is_intact(self) -> bool:
        """No hook is set, no module was replaced, none has a forward of its own."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return False
        if any(self._hooks) or any("forward" in attributes for attributes in self._attributes):
            return False
        return all(now == then for now, then in self._places)
