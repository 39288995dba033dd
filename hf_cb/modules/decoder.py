"""Decoder layers on packed weights, computed by one native call: a whole model's step, or a few layers of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cb.kernels.cpu import library as lib
from hf_cb.kernels.cpu.linear import PANEL, Columns, in_turns, side_by_side
from hf_cb.modules.recipe import LayerRecipe, ModelRecipe, NormRecipe, Piece, RotaryRecipe
from hf_cb.modules.weights import PackedWeights
from hf_cb.steps import StepBatch

POSITIONS = 4096
NORMS = ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "q_norm", "k_norm")


@dataclass
class Place:
    """Where a layer keeps its keys and values, as its backend describes it; and which of a step's groups it is in."""

    attention: lib.Attention
    group: int


class PackedDecoder:
    """Layers with their weights packed, for `Decoder` to run. Without `model`, they take and give hidden states.

    Args:
        weights: takes the weights out of their modules; None copies them.
    """

    def __init__(
        self,
        layers: Sequence[LayerRecipe],
        table: lib.Table,
        threads: int,
        weights: PackedWeights | None = None,
        model: ModelRecipe | None = None,
    ) -> None:
        self.table = table
        self.recipes = list(layers)
        self.weights = weights
        self.dtype = layers[0].o.weight.dtype
        self.hidden = layers[0].o.out_features
        self.layers = (lib.Layer * len(layers))()
        self.model = lib.Model(num_layers=len(layers), hidden=self.hidden, dtype=lib.DTYPES[self.dtype])
        self._threads = threads
        self._kept: list[Any] = []  # what the structs point to
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}
        for struct, recipe in zip(self.layers, layers, strict=True):
            self._fill(struct, recipe)
        if model is not None:
            self._fill_model(model)

    def rotary_table(self, rotary: RotaryRecipe, positions: int) -> tuple[Tensor, Tensor]:
        """Float32 cosines and sines `[n, dim]` of at least that many positions."""
        found = self._tables.get(rotary.key)
        if found is None or len(found[0]) < positions:
            cos, sin = rotary.table(positions)
            found = self._tables[rotary.key] = cos.float().contiguous(), sin.float().contiguous()
        return found

    def _fill(self, struct: Any, recipe: LayerRecipe) -> None:
        sizes = [p.size for p in recipe.qkv]
        struct.qkv = self._linear(side_by_side(sizes, self.hidden, self.dtype), recipe.qkv, sum(sizes))
        struct.o = self._alone(recipe.o)
        size = recipe.down.in_features
        if recipe.gated:  # one matrix, panel after panel: a gate's and then an up's
            turns = in_turns(size, self.hidden, self.dtype)
            struct.gate_up = self._linear(turns, recipe.gate_up, 2 * -(-size // PANEL) * PANEL)
        else:
            struct.gate_up = self._linear(side_by_side([size], self.hidden, self.dtype), recipe.gate_up, size)
        struct.down = self._alone(recipe.down)
        for name in NORMS:
            if (norm := getattr(recipe, name)) is not None:
                setattr(struct, name, self._norm(norm))
        struct.norm_whole, struct.gated, struct.parallel = recipe.norm_whole, recipe.gated, recipe.parallel
        struct.activation = lib.ACTIVATIONS[recipe.activation]
        struct.residual_multiplier = recipe.residual_multiplier
        struct.rotary_interleaved = recipe.rotary is not None and recipe.rotary.interleaved

    def _fill_model(self, model: ModelRecipe) -> None:
        self.model.vocab = model.head.out_features
        self.model.head = self._alone(model.head)
        if not model.tied:
            embedding = model.embedding.weight.detach()
            self._kept.append(embedding)
            self.model.embedding = embedding.data_ptr()
        self.model.final_norm = self._norm(model.final_norm)
        self.model.embedding_multiplier = model.embedding_multiplier
        self.model.logits_multiplier = model.logits_multiplier
        self.model.logits_softcap = model.logits_softcap or 0.0

    def _alone(self, module: nn.Linear) -> lib.Linear:
        columns = side_by_side([module.out_features], module.in_features, self.dtype)
        return self._linear(columns, [Piece(module)], module.out_features)

    def _linear(self, columns: Sequence[Columns], pieces: Sequence[Piece], count: int) -> lib.Linear:
        """Packs the pieces' weights; `count` columns of the matrix are computed. Pieces of one weight go together."""
        parts: dict[nn.Linear, list[Columns]] = {}
        for piece, part in zip(pieces, columns, strict=True):
            parts.setdefault(piece.module, []).append(part)
        for module, own in parts.items():
            if self.weights is not None:
                self.weights.take(module.weight, own)
            else:
                values, row = module.weight.detach(), 0
                for part in own:
                    part.pack(self.table, values[row : row + part.columns], self._threads)
                    row += part.columns
        bias = _bias(pieces)
        self._kept += [*columns, bias]
        packed, depth = columns[0].packed, columns[0].depth
        return lib.Linear(packed.data_ptr(), lib.pointer(bias), count, depth, first_column=0, panel_stride=1)

    def _norm(self, norm: NormRecipe) -> lib.Norm:
        weight = norm.module.weight.detach().float() + float(norm.plus_one)
        bias = getattr(norm.module, "bias", None)
        bias = None if bias is None else bias.detach().float()
        self._kept += [weight, bias]
        return lib.Norm(weight=weight.data_ptr(), bias=lib.pointer(bias), eps=norm.eps, centred=norm.centred)


class Decoder:
    """A PackedDecoder over one KV cache. One thread at a time runs it.

    Args:
        positions: that rotary tables begin with; they grow when a longer sequence comes.
    """

    def __init__(self, packed: PackedDecoder, places: Sequence[Place], positions: int = POSITIONS) -> None:
        self.packed = packed
        self._workspace = lib.Workspace()
        self._layers = type(packed.layers).from_buffer_copy(packed.layers)
        self._model = lib.Model.from_buffer_copy(packed.model)
        self._model.layers = self._layers
        self._model.num_groups = 1 + max(place.group for place in places)
        self._kept: list[Any] = []
        self._positions = 0
        for struct, place in zip(self._layers, places, strict=True):
            struct.attention, struct.group = place.attention, place.group
        self._grow(positions)

    def run(self, batch: StepBatch, hidden: Tensor) -> Tensor:
        """Hidden states `[T, H]` through all layers: `[T, H]`."""
        if hidden.dtype != self.packed.dtype or hidden.shape[1:] != (self.packed.hidden,) or not hidden.is_contiguous():
            raise ValueError(f"Hidden states of {self.packed.dtype} and size {self.packed.hidden} are wanted.")
        out = torch.empty_like(hidden)
        self._call(batch, hidden_in=hidden.data_ptr(), hidden_out=out.data_ptr())
        return out

    def logits(self, batch: StepBatch) -> Tensor:
        """Float32 logits `[S, V]` of the batch's `logits_rows`.

        Raises:
            IndexError: a token id that the model does not have.
        """
        out = torch.empty(len(batch.logits_rows), self._model.vocab, dtype=torch.float32, device="cpu")
        self._call(batch, logits=out.data_ptr())
        return out

    def best(self, batch: StepBatch) -> Tensor:
        """The token with the largest logit in each of the `logits_rows`, int64 `[S]`; -1 where one is NaN."""
        out = torch.empty(len(batch.logits_rows), dtype=torch.long, device="cpu")
        self._call(batch, best=out.data_ptr())
        return out

    def _call(self, batch: StepBatch, **outputs: Any) -> None:
        longest = max(batch.seq_lens_list)
        if longest > self._positions:
            self._grow(longest + POSITIONS)
        groups = batch.groups
        pointers = ctypes.c_void_p * len(groups)
        slots = pointers(*(g.slot_mapping.data_ptr() for g in groups))
        tables = pointers(*(g.block_table.data_ptr() for g in groups))
        widths = (ctypes.c_int64 * len(groups))(*(g.block_table.shape[1] for g in groups))
        step = lib.Step(
            ids=batch.input_ids.data_ptr(),
            positions=batch.position_ids.data_ptr(),
            rows=batch.logits_rows.data_ptr(),
            cu_seqlens=batch.cu_seqlens_q.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            slots=ctypes.addressof(slots),
            block_tables=ctypes.addressof(tables),
            max_blocks=ctypes.addressof(widths),
            num_tokens=len(batch.input_ids),
            num_rows=len(batch.logits_rows),
            num_requests=len(batch.seq_lens_list),
            **outputs,
        )
        call, threads = self.packed.table.step, torch.get_num_threads()
        lib.check(call(self._workspace.handle, ctypes.byref(self._model), ctypes.byref(step), threads))

    def _grow(self, positions: int) -> None:
        """Rotary tables for that many positions."""
        self._positions = positions
        self._kept.clear()
        for struct, recipe in zip(self._layers, self.packed.recipes, strict=True):
            if recipe.rotary is not None:
                cos, sin = self.packed.rotary_table(recipe.rotary, positions)
                self._kept += [cos, sin]
                struct.cos, struct.sin, struct.rotary_dim = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]


def _bias(pieces: Sequence[Piece]) -> Tensor | None:
    """The pieces' biases in float32, one after the other; zeros where one has none."""
    found = [(piece, piece.module.bias) for piece in pieces]
    if all(bias is None for _, bias in found):
        return None
    zeros = torch.zeros(max(piece.size for piece, _ in found), dtype=torch.float32, device="cpu")
    parts = [zeros[: p.size] if b is None else b.detach()[p.first : p.first + p.size].float() for p, b in found]
    return torch.cat(parts)
