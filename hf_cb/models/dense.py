"""The fallback: every request has the cache that `generate` would give it, and the model's own forward.

Right for any model that `generate` is right for, as it takes `generate`'s own steps. A prompt is computed alone and
whole, in the step that wants its first token: recurrent layers often take a whole prompt or a single token, and nothing
in between. Then all requests that decode are one batch, padded on the left, where the model can do that. KV blocks
count tokens here and hold nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from hf_cb.core import Request, StepBatch
from hf_cb.models.device import device_of, turn
from hf_cb.models.groups import LayerGroup
from hf_cb.models.lanes import Lanes
from hf_cb.models.rope import reset, rotary_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DenseModel:
    """A runner like PagedModel.

    Args:
        batched: decode all requests in one padded forward.
        recompute: keep no cache, and compute the whole sequence for every token.
    """

    shares_prefixes = False

    def __init__(self, model: PreTrainedModel, batched: bool = False, recompute: bool = False) -> None:
        self.model = model
        self.groups = [LayerGroup(layers=(), storages=())]
        self.recompute = recompute
        # of each request the arguments of the model's next forward, its cache among them
        self.lanes = Lanes()
        self._turn = turn(model)
        self._rotary = rotary_by_length(model)
        self.batched = batched and not recompute and not self._rotary  # those would see the longest of the batch
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def weights_key(self) -> object:
        return None  # nothing is shared between requests

    def key_regime(self, request: Request) -> Hashable:
        return None

    def forget(self, request: Request) -> None:
        self.lanes.forget(request)

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> Tensor:
        """The logits `[S, V]` of the rows that are wanted."""
        ends, sampled = batch.cu_seqlens_q[1:].tolist(), set(batch.logits_rows.tolist())
        wanted = {
            request: length
            for request, end, length in zip(batch.requests, ends, batch.seq_lens_list, strict=True)
            if end - 1 in sampled
        }
        if not wanted:
            return torch.empty(0, 0, device=self.device)
        decoding = [r for r, length in wanted.items() if self.lanes.length(r) == length - 1 and not self.recompute]
        rows: dict[Request, Tensor] = {}
        with self._turn:
            if self.batched and len(decoding) > 1:
                rows |= zip(decoding, self._decode_together(decoding).split(1), strict=True)
            for request, length in wanted.items():
                if request not in rows:
                    ids = torch.tensor([request.token_ids[:length]], device=self.device)
                    rows[request] = self._decode(request, ids) if request in decoding else self._begin(request, ids)
        return torch.cat([rows[request] for request in wanted])

    def _begin(self, request: Request, ids: Tensor) -> Tensor:
        """The logits `[1, V]` after a whole sequence `[1, n]`, computed as `generate` does: the prompt at once, which
        not every model sees causally, and what has been generated token by token."""
        prompt = ids[:, : len(request.prompt_ids)] if not self.recompute else ids
        logits = self._prefill(request, prompt)
        for end in range(prompt.shape[1], ids.shape[1]):
            logits = self._decode(request, ids[:, : end + 1])
        return logits

    def _prefill(self, request: Request, ids: Tensor) -> Tensor:
        kwargs = self._prepare(ids)
        self._reset_rope()
        out = self.model._prefill(ids, self._config(), kwargs, is_first_iteration=True)
        self.lanes.put(request, self._next(out, kwargs), ids.shape[1])
        return out.logits[:, -1]

    def _decode(self, request: Request, ids: Tensor) -> Tensor:
        """The logits `[1, V]` after a sequence `[1, n]` of which all but the last token is in the cache."""
        kwargs = self.lanes.one(request)
        out = self._forward(ids, kwargs)
        self.lanes.put(request, self._next(out, kwargs), ids.shape[1])
        return out.logits[:, -1]

    def _decode_together(self, requests: list[Request]) -> Tensor:
        """The logits `[N, V]` of these requests, which have one new token each."""
        kwargs = self.lanes.together(requests)
        longest = max(len(r.token_ids) for r in requests)
        ids = torch.tensor([[0] * (longest - len(r.token_ids)) + r.token_ids for r in requests], device=self.device)
        out = self._forward(ids, kwargs)
        self.lanes.put_together(self._next(out, kwargs), tokens=1)
        return out.logits[:, -1]

    def _forward(self, ids: Tensor, kwargs: dict[str, Any]) -> Any:
        self._reset_rope()
        step = 1 if kwargs["use_cache"] else None
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=step, **kwargs)
        return self.model(**inputs, return_dict=True)

    def _next(self, out: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return self.model._update_model_kwargs_for_generation(out, kwargs, is_encoder_decoder=False)

    def _reset_rope(self) -> None:
        for module in self._rotary:  # it keeps what the longest sequence so far has asked for
            reset(module)

    def _config(self) -> Any:
        return self.model._prepare_generation_config(None)[0]

    def _prepare(self, ids: Tensor) -> dict[str, Any]:
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
