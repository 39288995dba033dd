"""The fallback: every request has the cache that `generate` would give it, and the model's own forward.

Right for any model that `generate` is right for, as it takes `generate`'s own steps. A prompt is computed alone and
whole, in the step that wants its first token: recurrent layers often take a whole prompt or a single token, and nothing
in between. Then all requests that decode are one batch, padded on the left, where the model can do that. KV blocks
count tokens here and hold nothing.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from hf_cb.core import Request
from hf_cb.errors import UnsupportedModelError
from hf_cb.models.device import device_of, turn
from hf_cb.models.groups import LayerGroup
from hf_cb.models.lanes import Lanes
from hf_cb.models.rope import reset, rotary_by_length, states_kept
from hf_cb.steps import StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORT = 6  # bits: sequences up to 63 tokens are of one size


class DenseModel:
    """A runner like PagedModel.

    Args:
        batched: decode all requests in one padded forward.
        recompute: keep no cache, and compute the whole sequence for every token.
    """

    shares_prefixes = overlaps = scores_prompts = False

    def __init__(self, model: PreTrainedModel, batched: bool = False, recompute: bool = False) -> None:
        self.model = model
        self.groups = [LayerGroup(layers=(), storages=())]
        self.recompute = recompute
        self.batched = batched
        # of each request the arguments of the model's next forward, its cache among them; by size, so that nobody is
        # padded to more than twice its own length
        self._lanes: defaultdict[int, Lanes] = defaultdict(Lanes)
        self._lane_of: dict[Request, Lanes] = {}
        self._rotary = rotary_by_length(model)
        self._turn = turn(model, always=bool(self._rotary))
        if batched and self._rotary:
            raise UnsupportedModelError("its rotary embeddings would see the longest sequence of the batch")
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def lend(self) -> None:
        """Nothing is borrowed between steps."""

    def new_requests(self) -> None:
        """Nothing to prepare."""

    def warm_up(self) -> None:
        """Nothing takes long at first."""

    def weights_key(self) -> object:
        return None  # nothing is shared between requests

    def key_regime(self, request: Request) -> Hashable:
        return None

    def forget(self, request: Request) -> None:
        if (lanes := self._lane_of.pop(request, None)) is not None:
            lanes.forget(request)

    def __len__(self) -> int:
        """Requests that have a cache."""
        return len(self._lane_of)

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
        rows: dict[Request, Tensor] = {}
        groups: defaultdict[Lanes, list[Request]] = defaultdict(list)
        for request, length in wanted.items():
            if not self.recompute and self._length(request) == length - 1:
                groups[self._move(request, length)].append(request)
        with self._turn, states_kept(self._rotary):
            for lanes, requests in groups.items():
                if self.batched and len(requests) > 1:
                    rows |= self._decode_together(lanes, requests)
                else:
                    rows |= {r: self._decode(r, self._ids(r, wanted[r])) for r in requests}
            for request, length in wanted.items():
                if request not in rows:
                    rows[request] = self._begin(request, self._ids(request, length))
        return torch.cat([rows[request] for request in wanted])

    def _ids(self, request: Request, length: int) -> Tensor:
        return torch.tensor([request.token_ids[:length]], device=self.device)

    def _length(self, request: Request) -> int | None:
        lanes = self._lane_of.get(request)
        return None if lanes is None else lanes.length(request)

    def _lanes_for(self, length: int) -> Lanes:
        return self._lanes[max(SHORT, length.bit_length())]

    def _move(self, request: Request, length: int) -> Lanes:
        """To where requests of this length are."""
        lanes, now = self._lanes_for(length), self._lane_of[request]
        if lanes is not now:
            lanes.put(request, now.one(request), length - 1)
            now.forget(request)
            self._lane_of[request] = lanes
        return lanes

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
        self.forget(request)
        lanes = self._lane_of[request] = self._lanes_for(ids.shape[1])
        lanes.put(request, self._next(out, kwargs), ids.shape[1])
        return out.logits[:, -1]

    def _decode(self, request: Request, ids: Tensor) -> Tensor:
        """The logits `[1, V]` after a sequence `[1, n]` of which all but the last token is in the cache."""
        lanes = self._lane_of[request]
        kwargs = lanes.one(request)
        out = self._forward(ids, kwargs)
        lanes.put(request, self._next(out, kwargs), ids.shape[1])
        return out.logits[:, -1]

    def _decode_together(self, lanes: Lanes, requests: list[Request]) -> dict[Request, Tensor]:
        """The logits `[1, V]` of each of these requests, which have one new token each."""
        kwargs, order = lanes.together(requests)
        longest = max(len(r.token_ids) for r in order)
        ids = torch.tensor([[0] * (longest - len(r.token_ids)) + r.token_ids for r in order], device=self.device)
        out = self._forward(ids, kwargs)
        lanes.put_together(self._next(out, kwargs), tokens=1)
        return dict(zip(order, out.logits[:, -1].split(1), strict=True))

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
        config = self.model._prepare_generation_config(None)[0]
        # a cache that grows gives the same answers as one of fixed size, and a prompt at once as in chunks
        for name in ("cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"):
            setattr(config, name, None)
        return config

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
