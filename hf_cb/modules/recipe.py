"""What a decoder does, as data: enough to compute it without its modules. Nothing here touches a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_cb.steps import LayerFacts


@dataclass(frozen=True)
class NormRecipe:
    """RMSNorm, or LayerNorm where `centred`. `plus_one`: multiplies with 1 + weight (Gemma). `rounds_once`: in half
    precision the weight is multiplied with what is not rounded yet (Gemma, OLMo 2)."""

    module: nn.Module
    eps: float
    centred: bool = False
    plus_one: bool = False
    rounds_once: bool = False


@dataclass(frozen=True)
class Piece:
    """Rows [first, first + rows) of a linear layer's weight; `rows` None: all of them."""

    module: nn.Linear
    first: int = 0
    rows: int | None = None

    @property
    def size(self) -> int:
        return self.module.out_features if self.rows is None else self.rows


@dataclass(frozen=True)
class RotaryRecipe:
    """How a layer's positions become angles: `angles(positions)` gives cosines and sines `[n, dim]` of positions `[n]`,
    which for `interleaved` ones holds each twice in a row."""

    angles: Callable[[Tensor], tuple[Tensor, Tensor]]
    key: Any  # layers with the same key share their angles
    module: nn.Module  # whose buffers they depend on
    interleaved: bool = False

    def table(self, positions: int) -> tuple[Tensor, Tensor]:
        """Of the positions 0 to `positions` - 1."""
        return self.angles(torch.arange(positions, device="cpu"))


@dataclass(frozen=True)
class LayerRecipe:
    """One decoder layer; its formula is at `Layer` in `kernels/cpu/api.h`.

    `qkv` and `gate_up` are pieces of linear layers in that order; without `gated`, `gate_up` is one that goes up.
    """

    module: nn.Module
    facts: LayerFacts
    qkv: tuple[Piece, ...]
    o: nn.Linear
    gate_up: tuple[Piece, ...]
    down: nn.Linear
    activation: str
    gated: bool
    input_norm: NormRecipe | None = None
    post_attention_norm: NormRecipe | None = None
    pre_mlp_norm: NormRecipe | None = None
    post_mlp_norm: NormRecipe | None = None
    q_norm: NormRecipe | None = None
    k_norm: NormRecipe | None = None
    norm_whole: bool = False
    rotary: RotaryRecipe | None = None
    residual_multiplier: float = 1.0
    parallel: bool = False

    def but(self, **changes: Any) -> LayerRecipe:
        return replace(self, **changes)

    def linears(self) -> list[nn.Linear]:
        found = [*(p.module for p in self.qkv), self.o, *(p.module for p in self.gate_up), self.down]
        return list(dict.fromkeys(found))

    def norms(self) -> list[NormRecipe]:
        found = (self.input_norm, self.post_attention_norm, self.pre_mlp_norm, self.post_mlp_norm)
        return [norm for norm in (*found, self.q_norm, self.k_norm) if norm is not None]


@dataclass(frozen=True)
class ModelRecipe:
    """A whole decoder: embedding, layers, final norm, head."""

    embedding: nn.Embedding
    layers: tuple[LayerRecipe, ...]
    final_norm: NormRecipe
    head: nn.Linear
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None

    def packed(self) -> list[nn.Parameter]:
        """The weights that go into packed matrices."""
        return [linear.weight for layer in self.layers for linear in layer.linears()] + [self.head.weight]

    @property
    def tied(self) -> bool:
        return self.embedding.weight is self.head.weight
