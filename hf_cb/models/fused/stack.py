"""A model on packed weights. Where every layer was recognised, a step is one native call.

The call is made where nothing stands in its way: no hook, no module replaced, no weight unpacked. Any other step goes
through the model's own modules, on the same KV cache, and their linear layers run on the packed weights.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_cb.attention.cpu import CpuBackend
from hf_cb.models.fused import gpu_stack
from hf_cb.models.fused import known as knowing
from hf_cb.models.fused.known import Known, known_of
from hf_cb.models.fused.reading import place_of
from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import ModelPlan
from hf_cb.models.sending import to_device
from hf_cb.modules.decoder import Decoder
from hf_cb.modules.wanted import Mode
from hf_cb.modules.weights import is_packed
from hf_cb.steps import Drawn, StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACK_AGAIN_S = 1.0  # after somebody has looked at the weights: they may look again


class StackModel(PagedModel):
    """A PagedModel whose weights are packed while it runs."""

    def __init__(self, mode: Mode, *args: Any) -> None:
        super().__init__(*args)
        self._decoder: Decoder | None = None
        self._known: Known | None = None  # while it is found out
        self._lent = False
        self._known = known_of(self, mode)
        self.pack()

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> Tensor | Drawn:
        decoder = self._ready()
        if decoder is None:
            return super().forward(batch)
        batch = to_device(batch, self.device)
        self._prepare_blocks(batch)
        with self._turn:
            return Drawn(decoder.best(batch)) if batch.best_is_enough else decoder.logits(batch)

    def new_requests(self) -> None:
        known = self._known
        if known is not None and not known.is_current():
            weights = known.weights
            if weights is None or time.monotonic() - weights.unpacked_at > PACK_AGAIN_S:
                self.pack()

    def pack(self) -> None:
        """Packs the weights, unless they are, or something stands in the way."""
        known, backend = self._known, self.backend
        if known is None or not isinstance(backend, CpuBackend) or backend.table is None:
            return
        self._decoder = None
        with knowing.lock:
            known.pack(self.model, backend.table)
            if known.decoder is not None and known.weights is not None:
                places = [place_of(self, i) for i in range(len(known.decoder.recipes))]
                self._decoder = Decoder(known.decoder, places)
                known.weights.tell(self)

    def lend(self) -> None:
        if self._known is not None:
            self._known.unpack()
        self._lent = True

    def weights_unpacked(self) -> None:
        self._decoder = None

    def _ready(self) -> Decoder | None:
        """What makes this step's call, if it may be the native one."""
        if self._lent:
            self._lent = False
            self.pack()
        known, decoder = self._known, self._decoder
        if known is None or known.recipe is None:
            return None
        if not known.is_current():
            known.unpack()
            return None
        if known.weights is not None:
            known.weights.let_go()
        if decoder is None or decoder.packed is not known.decoder:  # another manager has packed it
            self.pack()
            decoder = self._decoder
        return decoder if known.guard.is_intact() else None


def forget(model: PreTrainedModel) -> None:
    """The model's weights are as they were, and what was learnt of its modules is forgotten."""
    knowing.forget(model)
    gpu_stack.forget(model)


def what_runs(model: PreTrainedModel, plan: ModelPlan, mode: Mode) -> str:
    """What a model's layers would run as, in words. Leaves its weights packed or unpacked, as they were."""
    if plan.backend is None:
        return "the model's own"
    if mode == "fused" and not isinstance(plan.backend, CpuBackend):
        return gpu_stack.what_runs(model, plan)
    packed_before = any(is_packed(parameter) for parameter in model.parameters())
    runner = StackModel(mode, model, plan.trace, plan.groups, plan.backend, len(plan.groups), plan.config.block_size)
    known = runner._known
    assert known is not None
    if not packed_before:
        known.unpack()
    if known.recipe is not None:
        return "every layer is recognised: a step is one native call, on packed weights"
    own = f"the model's own ({known.why_not})" if known.why_not else "the model's own"
    return own + ("; linear layers run on packed weights" if known.linears else "")
