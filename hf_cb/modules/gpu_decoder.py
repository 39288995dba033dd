"""Decoder layers on our Triton kernels: nine or ten launches a layer, where a model's own modules make about forty.

What is computed is the formula at `Layer` in `kernels/cpu/api.h`, rounded where transformers' modules round. Nothing
here waits for the device or looks at a value, so a step can be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cb.modules.merged import Product
from hf_cb.modules.recipe import LayerRecipe, ModelRecipe, NormRecipe
from hf_cb.modules.recognise import ACTIVATIONS, NotRecognised
from hf_cb.steps import StepBatch

Angles = Mapping[Any, tuple[Tensor, Tensor]]


class LayerCache(Protocol):
    """A layer's keys and values `[num_blocks, block_size, Hkv, D]`, and where the step's tokens go, int64 `[T]`."""

    k: Tensor
    v: Tensor
    slot_mapping: Tensor

    def attend(self, q: Tensor) -> Tensor:
        """Attention of q `[T, Hq, D]` over what is stored: `[T, Hq, Dv]`."""
        ...


@dataclass(frozen=True)
class Kernels:
    rms_norm: Callable[..., Any]
    rope_store: Callable[..., Tensor]
    store_kv: Callable[..., None]
    act_and_mul: Callable[..., Tensor]


@functools.cache
def kernels() -> Kernels:
    from hf_cb.kernels.triton.activation import act_and_mul
    from hf_cb.kernels.triton.kv_store import store_kv
    from hf_cb.kernels.triton.rms_norm import rms_norm
    from hf_cb.kernels.triton.rope_store import rope_store

    return Kernels(rms_norm, rope_store, store_kv, act_and_mul)


class GpuLayer:
    """One layer. Hidden states come and go as a sum of two, since the next norm adds them.

    Raises:
        NotRecognised: the recipe has something that the kernels lack.
    """

    def __init__(self, recipe: LayerRecipe) -> None:
        if why := lacking(recipe):
            raise NotRecognised(f"the kernels have no {why}")
        self.recipe = recipe
        facts = recipe.facts
        kv_heads = facts.num_kv_heads
        self.shapes = ((facts.num_heads, facts.head_dim), (kv_heads, facts.head_dim), (kv_heads, facts.v_head_dim))
        self.sizes = [heads * dim for heads, dim in self.shapes]
        self.qkv = Product([piece.module for piece in recipe.qkv])
        self.gate_up = Product([piece.module for piece in recipe.gate_up])

    def run(self, hidden: Tensor, more: Tensor | None, angles: Angles, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """`hidden` and `more` `[T, H]`, both overwritten, to the two after it."""
        recipe = self.recipe
        x, hidden = add_and_norm(hidden, more, recipe.input_norm)
        q = self._place(self.qkv(x), angles, cache)
        more = _linear(recipe.o, cache.attend(q).flatten(1))
        x, hidden = add_and_norm(hidden, self._scaled(more, recipe.post_attention_norm), recipe.pre_mlp_norm)
        active = self.gate_up(x)
        if recipe.gated:
            active = kernels().act_and_mul(active, activation=recipe.activation)
        else:
            active = ACTIVATIONS[recipe.activation](active)
        return hidden, self._scaled(_linear(recipe.down, active), recipe.post_mlp_norm)

    def _scaled(self, more: Tensor, norm: NormRecipe | None) -> Tensor:
        if norm is not None:
            normed(more, norm, out=more)
        return more if self.recipe.residual_multiplier == 1.0 else more.mul_(self.recipe.residual_multiplier)

    def _place(self, qkv: Tensor, angles: Angles, cache: LayerCache) -> Tensor:
        """Keys and values go to the cache; the queries `[T, Hq, D]`, normalised and rotated as the keys were."""
        recipe, ops = self.recipe, kernels()
        q, k, v = qkv.split(self.sizes, -1)
        if recipe.norm_whole:
            self._norm_apart(q, k)
        q, k, v = (x.unflatten(1, shape) for x, shape in zip((q, k, v), self.shapes, strict=True))
        caches = (cache.k, cache.v, cache.slot_mapping)
        if recipe.rotary is None:
            if not recipe.norm_whole:
                self._norm_apart(q, k)
            ops.store_kv(k, v, *caches)
            return q
        options: dict[str, Any] = dict(interleaved=recipe.rotary.interleaved)
        cos, sin = angles[recipe.rotary.key]
        options["rotary_dim"] = cos.shape[1]
        if recipe.rotary.interleaved:  # each twice in a row, and the kernel wants each once
            cos, sin = cos[:, ::2], sin[:, ::2]
        if recipe.q_norm is not None and recipe.k_norm is not None and not recipe.norm_whole:
            options |= dict(q_weight=recipe.q_norm.module.weight, k_weight=recipe.k_norm.module.weight)
            options |= dict(eps=recipe.q_norm.eps, **_style(recipe.q_norm))
        return ops.rope_store(q, k, v, cos, sin, *caches, **options)

    def _norm_apart(self, q: Tensor, k: Tensor) -> None:
        """In place, over the last dimension."""
        for x, norm in ((q, self.recipe.q_norm), (k, self.recipe.k_norm)):
            if norm is not None:
                normed(x, norm, out=x)


class GpuDecoder:
    """A whole decoder: from a step's ids to the logits of the wanted rows.

    Raises:
        NotRecognised: the recipe has something that the kernels lack.
    """

    def __init__(self, recipe: ModelRecipe) -> None:
        if _is_other_norm(recipe.final_norm):
            raise NotRecognised("the kernels have no final norm with means or biases")
        self.recipe = recipe
        self.layers = [GpuLayer(layer) for layer in recipe.layers]
        self.products = [product for layer in self.layers for product in (layer.qkv, layer.gate_up)]
        self._rotaries = {layer.rotary.key: layer.rotary for layer in recipe.layers if layer.rotary is not None}

    @property
    def dtype(self) -> torch.dtype:
        return self.recipe.embedding.weight.dtype

    def logits(self, batch: StepBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Of the batch's `logits_rows`, `[S, V]` in the model's dtype."""
        recipe = self.recipe
        hidden, more = F.embedding(batch.input_ids, recipe.embedding.weight), None
        if recipe.embedding_multiplier != 1.0:
            hidden.mul_(recipe.embedding_multiplier)
        angles = {key: rotary.angles(batch.position_ids) for key, rotary in self._rotaries.items()}
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden, more = layer.run(hidden, more, angles, cache)
        final, _ = add_and_norm(hidden, more, recipe.final_norm)
        logits = _linear(recipe.head, final.index_select(0, batch.logits_rows))
        if recipe.logits_multiplier != 1.0:
            logits.mul_(recipe.logits_multiplier)
        cap = recipe.logits_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def add_and_norm(hidden: Tensor, more: Tensor | None, norm: NormRecipe | None) -> tuple[Tensor, Tensor]:
    """The sum's norm, and the sum. `more` and, with it, `hidden` are overwritten."""
    if more is None:
        return hidden if norm is None else normed(hidden, norm), hidden
    if norm is None:
        hidden += more
        return hidden, hidden
    return normed(more, norm, residual=hidden, residual_out=hidden, out=more)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


def normed(x: Tensor, norm: NormRecipe, **options: Any) -> Any:
    return kernels().rms_norm(x, norm.module.weight, norm.eps, **_style(norm), **options)


def _style(norm: NormRecipe) -> dict[str, Any]:
    return dict(offset=float(norm.plus_one), weight_in_fp32=norm.rounds_once)


def lacking(recipe: LayerRecipe) -> str | None:
    """What the kernels do not have of a layer's recipe."""
    if recipe.parallel:
        return "MLP beside attention"
    if any(_is_other_norm(norm) for norm in recipe.norms()):
        return "norms with means or biases"
    q, k = recipe.q_norm, recipe.k_norm
    if q is not None and k is not None and (q.eps, _style(q)) != (k.eps, _style(k)):
        return "query and key norms of different kinds"
    return None


def _is_other_norm(norm: NormRecipe) -> bool:
    return norm.centred or getattr(norm.module, "bias", None) is not None
