"""The fallback: every request has the cache that `generate` would give it, and the model's own forward, alone.

Right for any model that `generate` is right for, as it takes `generate`'s own steps; slow, since nothing is batched. KV
blocks count tokens here and hold nothing. A prompt is computed whole, in the step that wants its first token: recurrent
layers often take a whole prompt or a single token, and nothing in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from hf_cb.core import Request, StepBatch
from hf_cb.models.groups import LayerGroup
from hf_cb.models.rope import reset, rotary_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class _State:
    """A request's arguments for the model's next forward, its cache among them, and how many tokens that has seen."""

    kwargs: dict[str, Any]
    length: int


class DenseModel:
    """A runner like PagedModel. `recompute`: keep no cache, and compute the whole sequence for every token."""

    def __init__(self, model: PreTrainedModel, recompute: bool = False) -> None:
        self.model = model
        self.groups = [LayerGroup(layers=(), storages=())]
        self.recompute = recompute
        self._states: dict[Request, _State] = {}
        self._rotary = rotary_by_length(model)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    shares_prefixes = False

    @property
    def device(self) -> torch.device:
        return self.model.device

    def weights_key(self) -> object:
        return None  # nothing is shared between requests

    def key_regime(self, request: Request) -> Hashable:
        return None

    def forget(self, request: Request) -> None:
        self._states.pop(request, None)

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> Tensor:
        """The logits `[S, V]` of the rows that are wanted, request by request."""
        ends, sampled = batch.cu_seqlens_q[1:].tolist(), set(batch.logits_rows.tolist())
        rows = [
            self._advance(request, request.token_ids[:length])
            for request, end, length in zip(batch.requests, ends, batch.seq_lens_list, strict=True)
            if end - 1 in sampled
        ]
        return torch.cat(rows) if rows else torch.empty(0, 0, device=self.device)

    def _advance(self, request: Request, token_ids: list[int]) -> Tensor:
        """The logits `[1, V]` after these tokens."""
        for module in self._rotary:
            reset(module)  # it keeps what the longest sequence so far has asked for
        ids = torch.tensor([token_ids], device=self.device)
        state = self._states.pop(request, None)
        if state is None or state.length != len(token_ids) - 1 or self.recompute:
            state = _State(self._start(ids), 0)
            out = self.model._prefill(ids, self._config(), state.kwargs, is_first_iteration=True)
        else:
            step = 1 if state.kwargs["use_cache"] else None
            inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=step, **state.kwargs)
            out = self.model(**inputs, return_dict=True)
        kwargs = self.model._update_model_kwargs_for_generation(out, state.kwargs, is_encoder_decoder=False)
        self._states[request] = _State(kwargs, len(token_ids))
        return out.logits[:, -1]

    def _config(self) -> Any:
        return self.model._prepare_generation_config(None)[0]

    def _start(self, ids: Tensor) -> dict[str, Any]:
        """What `generate` prepares before its first forward."""
        config, model = self._config(), self.model
        kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        if self._takes_positions:
            kwargs["position_ids"] = model._prepare_position_ids_for_generation(ids, kwargs)
        if not self.recompute:
            model._prepare_cache_for_generation(config, kwargs, GenerationMode.GREEDY_SEARCH, 1, ids.shape[1] + 1)
        kwargs["use_cache"] = bool(config.use_cache) and not self.recompute
        if model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        return kwargs
