"""A model whose layers were all recognised: a step is one native call, and the weights live in packed matrices.

The call is made where nothing stands in its way: no hook, no module replaced, no weight unpacked. Any other step goes
through the model's own modules, on the same KV cache. What was found out about a model, and its packed weights, outlive
a manager: the next one starts at once.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hf_cb.attention.cpu import CpuBackend
from hf_cb.core import StepBatch
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import ModelPlan
from hf_cb.models.reading import Reading, place_of, read_decoder
from hf_cb.modules.decoder import Decoder, PackedDecoder
from hf_cb.modules.recipe import ModelRecipe
from hf_cb.modules.recognise import NotRecognised
from hf_cb.modules.weights import PackedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("hf_cb")

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # of logits, relative to the largest
PACK_AGAIN_S = 1.0  # after somebody has looked at the weights: they may look again


class StackModel(PagedModel):
    """A PagedModel that runs packed where it can; `why_not` says why it cannot at all."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._decoder: Decoder | None = None
        self._pause_ended = False
        self._known = _Known()  # while it is being read
        with _lock:
            known = _known.get(self.model)
            if known is None or not known.fits():
                known = _known[self.model] = _learn(self)
            self._known = known
        self.why_not = self._known.why_not
        self.pack()

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> Tensor:
        decoder = self._ready()
        if decoder is None:
            return super().forward(batch)
        self._prepare_blocks(batch)
        with self._turn:
            return decoder.best(batch) if batch.best_is_enough else decoder.logits(batch)

    def weights_key(self) -> object:
        weights = self._known.weights
        if weights is not None and weights.unpacked and time.monotonic() - weights.unpacked_at > PACK_AGAIN_S:
            self.pack()  # new requests have come
        return super().weights_key()

    def pack(self) -> None:
        """Packs the weights, unless they are, or something stands in the way."""
        with _lock:
            known = self._known
            if known.watch is None or not known.watch.is_intact():
                return
            if not known.is_current():
                known.unpack()
                known.pack(self)
            assert known.decoder is not None
            self._decoder = Decoder(known.decoder, [place_of(self, i) for i in range(len(known.decoder.recipes))])

    def lend(self) -> None:
        self._known.unpack()
        self._pause_ended = True

    def _ready(self) -> Decoder | None:
        """What makes this step's call, if it may be the native one."""
        if self._pause_ended:
            self._pause_ended = False
            self.pack()
        known, decoder = self._known, self._decoder
        if decoder is None or known.watch is None:
            return None
        if decoder.packed is not known.decoder or not known.is_current():
            self._decoder = None
            return None
        return decoder if known.watch.is_intact() else None


@dataclass
class _Known:
    """What is known of a model. With `why_not`, it keeps its own layers."""

    why_not: str | None = None
    recipe: ModelRecipe | None = None
    watch: _Watch | None = None
    decoder: PackedDecoder | None = None
    weights: PackedWeights | None = None
    copied: list[Any] = field(default_factory=list)

    def fits(self) -> bool:
        """Whether the model still is made of the modules that it was read from."""
        return self.watch is not None and self.watch.same_modules()

    def is_current(self) -> bool:
        weights, watch = self.weights, self.watch
        return weights is not None and watch is not None and not weights.unpacked and self.copied == watch.versions()

    def pack(self, paged: PagedModel) -> None:
        assert self.recipe is not None and self.watch is not None
        assert isinstance(paged.backend, CpuBackend) and paged.backend.table is not None
        threads = torch.get_num_threads()
        self.weights = PackedWeights(paged.backend.table, threads)
        try:
            self.decoder = PackedDecoder(self.recipe.layers, paged.backend.table, threads, self.weights, self.recipe)
        except BaseException:
            self.unpack()
            raise
        self.copied = self.watch.versions()

    def unpack(self) -> None:
        """Every weight goes back to its Parameter, bit for bit."""
        if self.weights is not None:
            self.weights.unpack()
        self.decoder = None


_lock = threading.RLock()
_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def forget(model: nn.Module) -> None:
    """Unpacks a model's weights, and forgets what was learnt."""
    with _lock:
        known = _known.pop(model, None)
    if known is not None:
        known.unpack()


def why_not_fused(model: PreTrainedModel, plan: ModelPlan) -> str | None:
    """Why a model's steps cannot be one native call, or None if they can. Leaves its weights as they are."""
    with _lock:
        known = _known.get(model)
        if known is None or not known.fits():
            if plan.backend is None:
                return "it is not on the paged path"
            blocks = 2 * len(plan.groups)
            StackModel(model, plan.trace, plan.groups, plan.backend, blocks, plan.config.block_size)
            known = _known[model]
            known.unpack()
    return known.why_not


@torch.no_grad()
def _learn(paged: PagedModel) -> _Known:
    """Reads the decoder, packs it and compares the whole; where that fails, nothing is changed."""
    known = _Known()
    try:
        reading = read_decoder(paged)
        known.recipe = reading.recipe
        known.watch = _Watch(paged.model, reading.recipe)
        known.pack(paged)
        _verify(paged, known, reading)
    except (NotRecognised, ValueError) as reason:
        known.unpack()
        known = _Known(why_not=str(reason))
        logger.info("%s keeps its own layers: %s", type(paged.model).__name__, reason)
    return known


def _verify(paged: PagedModel, known: _Known, reading: Reading) -> None:
    assert known.decoder is not None
    decoder = Decoder(known.decoder, [place_of(paged, i) for i in range(len(reading.recipe.layers))])
    got, want = decoder.logits(reading.batch), reading.logits
    off = float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
    if not off <= TOLERANCE[known.decoder.dtype]:
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
        self._copied = [(norm.module._parameters, name) for norm in norms for name in ("weight", "bias")]
        self._copied += [(linear._parameters, "bias") for linear in linears]
        if not recipe.tied:
            self._copied.append((recipe.embedding._parameters, "weight"))
        self._packed = [(linear._parameters, linear.weight) for linear in linears]

    def versions(self) -> list[Any]:
        """Moves when a parameter that was copied is written to or replaced."""
        found = [parameters.get(name) for parameters, name in self._copied]
        return [None if p is None else (p.data_ptr(), -1 if p.is_inference() else p._version) for p in found]

    def same_modules(self) -> bool:
        return all(now == then for now, then in self._places)

    def is_intact(self) -> bool:
        """No hook is set, no module or weight was replaced, none has a forward of its own."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return False
        if any(self._hooks) or any("forward" in attributes for attributes in self._attributes):
            return False
        return self.same_modules() and all(p.get("weight") is weight for p, weight in self._packed)
