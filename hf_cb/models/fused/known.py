"""What was found out about a model's modules, and its packed weights: they outlive a manager, so the next one starts at
once."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_cb.attention.cpu import CpuBackend
from hf_cb.kernels.cpu import library as lib
from hf_cb.models.fused.reading import Reading, native_layer, place_of, read_decoder
from hf_cb.models.fused.watching import least_blocks, small_batch
from hf_cb.models.guard import Guard
from hf_cb.models.paged import PagedModel
from hf_cb.models.sharding import is_sharded
from hf_cb.modules.decoder import Decoder, PackedDecoder
from hf_cb.modules.leaf import pack_linears
from hf_cb.modules.recipe import ModelRecipe
from hf_cb.modules.recognise import NotRecognised
from hf_cb.modules.wanted import Mode
from hf_cb.modules.weights import PackedWeights, WeightsInUse, forget_mark

logger = logging.getLogger("hf_cb")

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # of logits, relative to the largest
MOST_RAW = 16  # weights that a model may read past its linear layers, each of which is left alone

lock = threading.RLock()
os.register_at_fork(after_in_child=lambda: globals().update(lock=threading.RLock()))
_known: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()


@dataclass
class Known:
    """How a model's modules are made faster: whole layers (`recipe`), linear layers alone, or not at all.

    `why_not` says why it is not whole layers; `for_now`: for a reason that may pass, so the next manager asks again.
    `raw` are weights that the model uses in other ways too.
    """

    guard: Guard
    why_not: str | None = None
    recipe: ModelRecipe | None = None
    linears: bool = False
    for_now: bool = False
    raw: list[nn.Parameter] = field(default_factory=list)
    decoder: PackedDecoder | None = None
    weights: PackedWeights | None = None
    _versions: list[Any] = field(default_factory=list)

    def fits(self, mode: Mode) -> bool:
        """Whether it is what would be found out now."""
        if self.for_now or not self.guard.same_modules():
            return False
        if mode == "fused":
            return self.recipe is not None or self.why_not is not None
        return self.recipe is None

    def is_current(self) -> bool:
        """Whether what is packed is what the parameters hold."""
        weights = self.weights
        return weights is not None and not weights.unpacked and self._versions == self.guard.versions()

    def pack(self, model: nn.Module, table: lib.Table) -> None:
        """Packs the weights, unless they are packed or something stands in the way."""
        if (self.recipe is None and not self.linears) or not self.guard.is_intact():
            return
        if self.is_current() and self.guard.same_values():
            return
        self.unpack()
        threads = torch.get_num_threads()
        try:
            if self.recipe is None:
                self.weights = pack_linears(model, table, threads, self.raw)
            else:
                weights = PackedWeights(table, threads)
                with weights.packing(model, self.recipe.packed()):
                    decoder = PackedDecoder(self.recipe.layers, table, threads, weights, self.recipe)
                self.weights, self.decoder = weights, decoder
        except Exception as reason:  # the model computes as it is
            level = logging.INFO if isinstance(reason, WeightsInUse) else logging.WARNING
            logger.log(level, "%s is not packed: %s", type(model).__name__, reason)
            return
        if self.weights is not None:
            self.weights.tell(self)
        self._versions = self.guard.versions()
        self.guard.note_values()

    def unpack(self) -> None:
        """Every weight goes back to its Parameter, bit for bit."""
        self.decoder = None
        if self.weights is not None:
            self.weights.unpack()

    def weights_unpacked(self) -> None:
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
            with torch.device("cpu"):
                known = _known[paged.model] = _learn(paged, mode)
        return known


def forget(model: nn.Module) -> None:
    """Unpacks a model's weights, and forgets what was learnt."""
    with lock:
        known = _known.pop(model, None)
    if known is not None:
        known.unpack()
    for parameter in model.parameters():
        forget_mark(parameter)


@torch.no_grad()
def _learn(paged: PagedModel, mode: Mode) -> Known:
    model, backend = paged.model, paged.backend
    known = Known(Guard(model))
    if is_sharded(model):
        known.why_not = "its weights are spread over several processes"
        say(model, "modules", NotRecognised(known.why_not))
        return known
    if not isinstance(backend, CpuBackend) or backend.table is None:
        known.why_not, known.for_now = f"attention runs on the {backend.name} backend", True
        return known
    if backend.kv_dtype is not None or paged.num_blocks < least_blocks(paged):
        # in int8, what differs by rounding alone can differ by a whole step
        paged = PagedModel(model, paged.trace, paged.groups, CpuBackend(), least_blocks(paged), paged.block_size)
    if mode == "fused":
        if known.guard.has_hooks():
            known.why_not, known.for_now = "a hook is set, or a module has a forward of its own", True
        else:
            found = _read(paged, backend.table)
            if found.recipe is not None:
                return found
            known.why_not, known.for_now = found.why_not, found.for_now
    try:
        _try_linears(paged, known, backend.table)
    except Exception as reason:
        say(model, "linear layers", reason)
        known.unpack()
        known.linears = False
    return known


def _read(paged: PagedModel, table: lib.Table) -> Known:
    model = paged.model
    known = Known(Guard(model))
    try:
        reading = read_decoder(paged, native_layer)
        known = Known(Guard(model, reading.recipe), recipe=reading.recipe)
        known.pack(model, table)
        _verify_decoder(paged, known, reading)
        return known
    except Exception as reason:  # whatever it is, the model's own layers will do
        say(model, "layers", reason)
        known.unpack()
        passing = known.for_now or not isinstance(reason, NotRecognised)
        return Known(Guard(model), why_not=str(reason), for_now=passing)


def say(model: nn.Module, what: str, reason: Exception) -> None:
    """Logs why a model keeps its own layers."""
    expected = isinstance(reason, NotRecognised)
    level = logging.INFO if expected else logging.WARNING
    logger.log(level, "%s keeps its own %s: %s", type(model).__name__, what, reason, exc_info=not expected)


def _verify_decoder(paged: PagedModel, known: Known, reading: Reading) -> None:
    if known.decoder is None:
        known.for_now = True
        raise NotRecognised("another thread computes with it")
    places = [place_of(paged, i) for i in range(len(reading.recipe.layers))]
    decoder = Decoder(known.decoder, places, reading.positions)
    check_logits(decoder.logits(reading.batch), reading.logits, known.decoder.dtype)


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
            known.for_now = True
            raise NotRecognised("it has no plain linear layers, or another thread computes with them")
        got = paged.forward(batch).float()
        if not known.weights.unpacked:
            check_logits(got, want, paged.model.dtype)
            return
        if known.weights.asked_for is None:
            break
        known.raw.append(known.weights.asked_for)
    raise NotRecognised("it reads its weights in other ways than a linear layer does")


def check_logits(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Raises NotRecognised where they differ by more than rounding."""
    off = float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
    if not off <= TOLERANCE.get(dtype, 8e-2):
        raise NotRecognised(f"the logits of the whole are off by {off:.1g} times the largest one")
