"""A model on a GPU whose steps run as fused Triton kernels, where every layer was recognised.

What was found out about a model, with its merged weights, outlives a manager, so the next one starts at once. A step
runs fused where nothing stands in its way: no hook, no module replaced, no merged weight moved. Any other step goes
through the model's own modules, on the same KV cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_cb.attention.flash import FlashBackend
from hf_cb.attention.pages import Meta, Storage
from hf_cb.attention.triton import TritonBackend, device_problem, package_problem
from hf_cb.models.fused import known as knowing
from hf_cb.models.fused.known import check_logits, say
from hf_cb.models.fused.reading import read_decoder
from hf_cb.models.fused.watching import least_blocks
from hf_cb.models.guard import Guard
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import ModelPlan
from hf_cb.models.recorded.captured import CapturedModel
from hf_cb.models.sharding import is_sharded
from hf_cb.modules.gpu_decoder import GpuDecoder, GpuLayer
from hf_cb.modules.merged import merge
from hf_cb.modules.others import is_computing
from hf_cb.modules.recipe import LayerRecipe
from hf_cb.modules.recognise import NotRecognised
from hf_cb.steps import LayerFacts, StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_fused: weakref.WeakKeyDictionary[nn.Module, Fused] = weakref.WeakKeyDictionary()


@dataclass
class Fused:
    """How a model's steps run fused, or why not; `for_now`: for a reason that may pass, so the next manager asks again.

    `merged`: whether the decoder's products are on merged weights. Otherwise the model's own modules compute.
    """

    guard: Guard
    why_not: str | None = None
    for_now: bool = False
    decoder: GpuDecoder | None = None
    merged: bool = False

    def fits(self) -> bool:
        """Whether it is what would be found out now."""
        return not self.for_now and self.guard.same_modules()

    def is_current(self) -> bool:
        """Whether what is merged is what the parameters hold."""
        return self.merged and self.decoder is not None and all(p.is_current() for p in self.decoder.products)

    def merge(self, model: nn.Module) -> None:
        """Merges the weights, unless they are merged or something stands in the way."""
        if self.decoder is None or self.is_current() or not self.guard.is_intact() or is_computing(model):
            return
        self.merged = False
        try:
            with torch.inference_mode(False), torch.no_grad():
                merge(self.decoder.products, model)
        except torch.OutOfMemoryError as error:
            say(model, "layers", NotRecognised(f"there is no memory for merging its weights: {error}"))
            return
        self.merged = True

    def part(self) -> None:
        """Every parameter has memory of its own again."""
        self.merged = False
        with torch.inference_mode(False), torch.no_grad():
            for product in self.decoder.products if self.decoder is not None else ():
                product.part()


@dataclass
class Cache:
    """A layer's part of the KV cache in one step: the `LayerCache` of a GpuLayer."""

    backend: TritonBackend | FlashBackend
    facts: LayerFacts
    storage: Storage
    meta: Meta

    def __post_init__(self) -> None:
        self.k, self.v = self.storage
        self.slot_mapping = self.meta.slot_mapping

    def attend(self, q: Tensor) -> Tensor:
        return self.backend.attend_stored(self.storage, self.facts, q, self.meta)


class FusedModel(PagedModel):
    """A PagedModel whose steps run as the fused kernels, where they may."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._fused: Fused | None = None  # while it is found out
        self._fused = fused_of(self)

    def new_requests(self) -> None:
        assert self._fused is not None
        with knowing.lock:
            self._fused.merge(self.model)
        super().new_requests()

    def _compute(self, batch: StepBatch) -> Tensor:
        fused = self._fused
        if fused is None or fused.decoder is None or not fused.is_current() or not fused.guard.is_intact():
            return super()._compute(batch)
        if fused.decoder.dtype != self.trace.layers[0].dtype:
            return super()._compute(batch)  # which says what is wrong
        with self._turn:
            return fused.decoder.logits(batch, caches(self, batch, range(len(self.trace.layers))))


class CapturedFusedModel(FusedModel, CapturedModel):
    """A CapturedModel that records the fused kernels; the arguments are that one's."""

    def _is_steady(self) -> bool:
        fused = self._fused
        return fused is None or fused.decoder is None or fused.is_current()


def caches(paged: PagedModel, batch: StepBatch, layers: Sequence[int]) -> list[Cache]:
    """Those layers' parts of the KV cache in a step."""
    backend: Any = paged.backend
    places = [(i, *paged.place(i)) for i in layers]
    metas = {g: backend.prepare(batch, batch.groups[g], paged.device) for g in {group for _, _, group in places}}
    return [Cache(backend, paged.trace.layers[i], storage, metas[group]) for i, storage, group in places]


def fused_of(paged: PagedModel) -> Fused:
    """What is known of a model, found out now if need be; its weights are merged then.

    Where something disagrees with the model's own forward, it is left out, with the reason in the log.
    """
    with knowing.lock:
        fused = _fused.get(paged.model)
        if fused is None or not fused.fits():
            if fused is not None:
                fused.part()
            with torch.device("cpu"):
                fused = _fused[paged.model] = _learn(paged)
        fused.merge(paged.model)
        return fused


def forget(model: nn.Module) -> None:
    """Parts a model's weights, and forgets what was learnt."""
    with knowing.lock:
        fused = _fused.pop(model, None)
        if fused is not None:
            fused.part()
            fused.decoder = None  # a manager that still has it goes on with the model's own modules


def what_runs(model: PreTrainedModel, plan: ModelPlan) -> str:
    """What a model's layers would run as, in words. Leaves its weights merged or apart, as they were."""
    assert plan.backend is not None
    before = _fused.get(model)
    merged_before = before is not None and before.merged
    arguments = (model, plan.trace, plan.groups, plan.backend, len(plan.groups), plan.config.block_size)
    fused = fused_of(PagedModel(*arguments))
    if not merged_before:
        fused.part()
    if fused.decoder is not None:
        return "every layer is recognised: steps run as fused Triton kernels, on merged weights"
    return f"the model's own ({fused.why_not})"


@torch.no_grad()
def _learn(paged: PagedModel) -> Fused:
    model = paged.model
    fused = Fused(Guard(model))
    if why := _obstacle(paged, fused.guard):
        say(model, "layers", NotRecognised(why))
        return Fused(fused.guard, why, for_now=True)
    backend = paged.backend
    if isinstance(backend, TritonBackend) and backend.kv_dtype is not None:
        backend = TritonBackend()  # what differs by rounding alone would differ by a whole step of the cache's
    if paged.num_blocks < least_blocks(paged) or backend is not paged.backend:
        paged = PagedModel(model, paged.trace, paged.groups, backend, least_blocks(paged), paged.block_size)
    try:
        reading = read_decoder(paged, _fused_layer)
        decoder = GpuDecoder(reading.recipe)
        fused = Fused(Guard(model, reading.recipe), decoder=decoder)
        fused.merge(model)
        got = decoder.logits(reading.batch, caches(paged, reading.batch, range(len(paged.trace.layers))))
        check_logits(got.float(), reading.logits, decoder.dtype)
        return fused
    except Exception as reason:  # whatever it is, the model's own layers will do
        say(model, "layers", reason)
        fused.part()
        return Fused(Guard(model), why_not=str(reason), for_now=not isinstance(reason, NotRecognised))


def _obstacle(paged: PagedModel, guard: Guard) -> str | None:
    """What keeps any model from running fused, as things are."""
    if is_sharded(paged.model):
        return "its weights are spread over several processes"
    if not isinstance(paged.backend, TritonBackend | FlashBackend):
        return f"attention runs on the {paged.backend.name} backend"
    if {parameter.device for parameter in paged.model.parameters()} != {paged.device}:
        return "its weights lie on several devices"
    if guard.has_hooks():
        return "a hook is set, or a module has a forward of its own"
    return package_problem() or device_problem(paged.device)


def _fused_layer(paged: PagedModel, batch: StepBatch, index: int, recipe: LayerRecipe, before: Tensor) -> Tensor:
    """A layer by a recipe, on its weights as they are."""
    layer = GpuLayer(recipe)
    rotary = recipe.rotary
    angles = {rotary.key: rotary.angles(batch.position_ids)} if rotary is not None else {}
    hidden, more = layer.run(before.clone(), None, angles, *caches(paged, batch, [index]))
    return hidden + more
