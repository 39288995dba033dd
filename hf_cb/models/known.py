"""What was found out about a model's modules, and its packed weights: they outlive a manager, so the next one starts at
once."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hf_cb.attention.cpu import CpuBackend
from hf_cb.kernels.cpu import library as lib
from hf_cb.models.paged import PagedModel
from hf_cb.models.reading import Reading, place_of, read_decoder
from hf_cb.models.watching import small_batch
from hf_cb.modules.decoder import Decoder, PackedDecoder
from hf_cb.modules.leaf import pack_linears
from hf_cb.modules.recipe import ModelRecipe
from hf_cb.modules.recognise import NotRecognised
from hf_cb.modules.wanted import Mode
from hf_cb.modules.weights import PackedWeights, WeightsInUse

logger = logging.getLogger("hf_cb")

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # of logits, relative to the largest
MOST_RAW = 16  # weights that a model may read past its linear layers, each of which is left alone

lock = threading.RLock()
_known: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()


@dataclass
class Known:
    """How a model's modules are made faster: whole layers (`recipe`), linear layers alone, or not at all.

    `why_not` says why it is not whole layers; `for_now`: a hook was in the way, so the next manager asks again. `raw`
    are weights that the model uses in other ways too.
    """

    watch: Watch
    why_not: str | None = None
    recipe: ModelRecipe | None = None
    linears: bool = False
    for_now: bool = False
    raw: list[nn.Parameter] = field(default_factory=list)
    decoder: PackedDecoder | None = None
    weights: PackedWeights | None = None
    _copied: list[Any] = field(default_factory=list)

    def fits(self, mode: Mode) -> bool:
        """Whether it is what would be found out now."""
        if self.for_now or not self.watch.same_modules():
            return False
        return self.recipe is not None or self.why_not is not None if mode == "fused" else self.recipe is None

    def is_current(self) -> bool:
        """Whether what is packed is what the parameters hold."""
        weights = self.weights
        return weights is not None and not weights.unpacked and self._copied == self.watch.versions()

    def pack(self, model: nn.Module, table: lib.Table) -> None:
        """Packs the weights, unless they are packed or something stands in the way."""
        if self.is_current() or (self.recipe is None and not self.linears) or not self.watch.is_intact():
            return
        self.unpack()
        threads = torch.get_num_threads()
        try:
            if self.recipe is None:
                self.weights = pack_linears(model, table, threads, self.raw)
            else:
                weights = PackedWeights(table, threads)
                with weights.packing(model, self.recipe.packed()):
                    self.decoder = PackedDecoder(self.recipe.layers, table, threads, weights, self.recipe)
                self.weights = weights
        except WeightsInUse as reason:
            logger.info("Not packed yet: %s", reason)
            return
        self._copied = self.watch.versions()

    def unpack(self) -> None:
        """Every weight goes back to its Parameter, bit for bit."""
        if self.weights is not None:
            self.weights.unpack()
        self.decoder = None


def known_of(paged: PagedModel, mode: Mode) -> Known:
    """What is known of a model, found out now if need be; its weights are packed then.

    Where something disagrees with the model's own forward, it is left out, with the reason in the log.
    """
    with lock:
        known = _known.get(paged.model)
        if known is None or not known.fits(mode):
            if known is not None:
                known.unpack()
            known = _known[paged.model] = _learn(paged, mode)
        return known


def forget(model: nn.Module) -> None:
    """Unpacks a model's weights, and forgets what was learnt."""
    with lock:
        known = _known.pop(model, None)
    if known is not None:
        known.unpack()


@torch.no_grad()
def _learn(paged: PagedModel, mode: Mode) -> Known:
    name = type(paged.model).__name__
    backend = paged.backend
    if not isinstance(backend, CpuBackend) or backend.table is None:
        return Known(Watch(paged.model), why_not=f"attention runs on the {backend.name} backend")
    known = Known(Watch(paged.model))
    if mode == "fused" and known.watch.has_hooks():
        known.why_not, known.for_now = "a hook is set, or a module has a forward of its own", True
    elif mode == "fused":
        try:
            reading = read_decoder(paged)
            known = Known(Watch(paged.model, reading.recipe), recipe=reading.recipe)
            known.pack(paged.model, backend.table)
            _verify_decoder(paged, known, reading)
            return known
        except Exception as reason:  # whatever it is, the model's own layers will do
            if not isinstance(reason, NotRecognised):
                logger.warning("Reading the layers of %s failed", name, exc_info=True)
            known.unpack()
            known = Known(Watch(paged.model), why_not=str(reason), for_now=known.for_now)
            logger.info("%s keeps its own layers: %s", name, reason)
    try:
        _try_linears(paged, known, backend.table)
    except Exception as reason:
        if not isinstance(reason, NotRecognised):
            logger.warning("Packing the linear layers of %s failed", name, exc_info=True)
        known.unpack()
        known.linears = False
        logger.info("%s keeps its own linear layers: %s", name, reason)
    return known


def _verify_decoder(paged: PagedModel, known: Known, reading: Reading) -> None:
    if known.decoder is None:
        known.for_now = True
        raise NotRecognised("another thread computes with it")
    decoder = Decoder(known.decoder, [place_of(paged, i) for i in range(len(reading.recipe.layers))])
    _check(decoder.logits(reading.batch), reading.logits, known.decoder.dtype)


def _try_linears(paged: PagedModel, known: Known, table: lib.Table) -> None:
    """Packs them, and looks at a forward: weights that it reads in other ways are left alone next time."""
    if paged.rope is not None or paged.states is not None:
        raise NotRecognised("it has modules that must see each request by itself")
    batch = small_batch(paged)
    want = paged.forward(batch).float()
    known.linears = True
    while len(known.raw) <= MOST_RAW:
        known.pack(paged.model, table)
        if known.weights is None:
            raise NotRecognised("it has no plain linear layers, or another thread computes with them")
        got = paged.forward(batch).float()
        if not known.weights.unpacked:
            _check(got, want, paged.model.dtype)
            return
        if known.weights.asked_for is None:
            break
        known.raw.append(known.weights.asked_for)
    raise NotRecognised("it reads its weights in other ways than a linear layer does")


def _check(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    off = float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
    if not off <= TOLERANCE.get(dtype, 8e-2):
        raise NotRecognised(f"the logits of the whole are off by {off:.1g} times the largest one")


class Watch:
    """What must stay as it is for packed layers to compute what the model computes."""

    def __init__(self, model: nn.Module, recipe: ModelRecipe | None = None) -> None:
        modules = list(model.modules())
        self._hooks = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)]
        self._places = [(m._modules, dict(m._modules)) for m in modules if m._modules]
        self._attributes = [m.__dict__ for m in modules]
        self._whole = recipe is not None
        self._copied: list[tuple[dict[str, Any], str]] = []
        self._packed: list[tuple[dict[str, Any], nn.Parameter]] = []
        if recipe is None:
            return
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
        """No module or weight was replaced; for whole layers also: no hook is set, none has a forward of its own."""
        if not self.same_modules() or (self._whole and self.has_hooks()):
            return False
        return all(p.get("weight") is weight for p, weight in self._packed)

    def has_hooks(self) -> bool:
        """Also a forward that somebody has put on a module."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks or any(self._hooks):
            return True
        return any("forward" in attributes for attributes in self._attributes)
