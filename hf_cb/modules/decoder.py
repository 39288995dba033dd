"""Decoder layers on packed weights, computed by one native call: a whole model's step, or a single layer's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cb.attention.cpu import Storage
from hf_cb.core import StepBatch
from hf_cb.kernels.cpu import library as lib
from hf_cb.kernels.cpu.linear import Columns, in_turns, side_by_side
from hf_cb.modules.recipe import LayerRecipe, ModelRecipe, NormRecipe, Piece, RotaryRecipe
from hf_cb.modules.weights import PackedWeights

POSITIONS = 2048  # that rotary tables begin with; they grow when a longer sequence comes


@dataclass
class Place:
    """Where a layer keeps its keys and values: its storage, and which of the step's groups its tables are in."""

    storage: Storage
    group: int


class Decoder:
    """Layers ready to run. Without `model` they are run on hidden states alone.

    Args:
        places: for each layer.
        weights: takes the weights of all layers out of their modules, bit for bit; None copies them.
    """

    def __init__(
        self,
        layers: Sequence[LayerRecipe],
        places: Sequence[Place],
        table: lib.Table,
        weights: PackedWeights | None = None,
        model: ModelRecipe | None = None,
        threads: int = 1,
    ) -> None:
        found = lib.library()
        assert found is not None
        self.table = table
        self.dtype = layers[0].o.weight.dtype
        self.hidden = layers[0].o.out_features
        self._weights = weights
        self._threads = threads
        self._workspace = lib.Workspace(found)
        self._kept: list[Any] = []  # what the structs point to
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self._recipes = list(layers)
        self._layers = (lib.Layer * len(layers))()
        for struct, recipe, place in zip(self._layers, layers, places, strict=True):
            self._fill(struct, recipe, place)
        self._num_groups = 1 + max(place.group for place in places)
        self.vocab = 0
        self._model = lib.Model(
            layers=self._layers, num_layers=len(layers), hidden=self.hidden, num_groups=self._num_groups,
            dtype=lib.DTYPES[self.dtype],
        )
        if model is not None:
            self._fill_model(model)
        self._grow(POSITIONS)

    def run(self, batch: StepBatch, hidden: Tensor) -> Tensor:
        """Hidden states `[T, H]` through all layers: `[T, H]`."""
        out = torch.empty_like(hidden)
        self._call(batch, hidden_in=hidden.data_ptr(), hidden_out=out.data_ptr())
        return out

    def logits(self, batch: StepBatch) -> Tensor:
        """Float32 logits `[S, V]` of the batch's `logits_rows`."""
        out = torch.empty(len(batch.logits_rows), self.vocab)
        self._call(batch, logits=out.data_ptr())
        return out

    def best(self, batch: StepBatch) -> Tensor:
        """The token with the largest logit in each of the `logits_rows`, int64 `[S]`; -1 where one is NaN."""
        out = torch.empty(len(batch.logits_rows), dtype=torch.long)
        self._call(batch, best=out.data_ptr())
        return out

    def _call(self, batch: StepBatch, **outputs: Any) -> None:
        longest = max(batch.seq_lens_list)
        if self._tables and longest > self._model.layers[0].rotary_positions:
            self._grow(2 * longest)
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
        threads = torch.get_num_threads()
        lib.check(self.table.step(self._workspace.handle, ctypes.byref(self._model), ctypes.byref(step), threads))

    # --------------------------------------------------------------------------------------------------- filling structs

    def _fill(self, struct: Any, recipe: LayerRecipe, place: Place) -> None:
        facts = recipe.facts
        sizes = [p.size for p in recipe.qkv]
        qkv = side_by_side(sizes, self.hidden, self.dtype)
        self._pack(recipe.qkv, qkv)
        struct.qkv = self._linear(qkv, recipe.qkv, sum(sizes))
        struct.o = self._own(recipe.o)
        size = recipe.down.in_features
        ups = in_turns(size, self.hidden, self.dtype) if recipe.gated else side_by_side([size], self.hidden, self.dtype)
        self._pack(recipe.gate_up, ups)
        # as one matrix, panel after panel: a gate's and then an up's
        struct.gate_up = self._linear(ups, recipe.gate_up, 2 * -(-size // 32) * 32 if recipe.gated else size)
        struct.gate_up.panel_stride = 1
        struct.down = self._own(recipe.down)
        for name in ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "q_norm", "k_norm"):
            if (norm := getattr(recipe, name)) is not None:
                setattr(struct, name, self._norm(norm))
        struct.attention = place.storage.describe(facts)
        struct.norm_whole, struct.gated, struct.parallel = recipe.norm_whole, recipe.gated, recipe.parallel
        struct.activation = lib.ACTIVATIONS[recipe.activation]
        struct.group = place.group
        struct.residual_multiplier = recipe.residual_multiplier
        if recipe.rotary is not None:
            struct.rotary_interleaved = recipe.rotary.interleaved

    def _fill_model(self, model: ModelRecipe) -> None:
        head = model.head
        self.vocab = self._model.vocab = head.out_features
        self._model.head = self._own(head)
        if not model.tied:
            embedding = model.embedding.weight.detach()
            self._kept.append(embedding)
            self._model.embedding = embedding.data_ptr()
        self._model.final_norm = self._norm(model.final_norm)
        self._model.embedding_multiplier = model.embedding_multiplier
        self._model.logits_multiplier = model.logits_multiplier
        self._model.logits_softcap = model.logits_softcap or 0.0

    def _pack(self, pieces: Sequence[Piece], columns: Sequence[Columns]) -> None:
        """Each weight into its columns; pieces of one weight go together."""
        self._kept += columns
        by_module: dict[nn.Linear, list[Columns]] = {}
        for piece, part in zip(pieces, columns, strict=True):
            by_module.setdefault(piece.module, []).append(part)
        for module, parts in by_module.items():
            if self._weights is not None:
                self._weights.take(module.weight, parts)
                continue
            values, row = module.weight.detach(), 0
            for part in parts:
                part.pack(self.table, values[row : row + part.columns], self._threads)
                row += part.columns

    def _own(self, module: nn.Linear) -> lib.Linear:
        columns = side_by_side([module.out_features], module.in_features, self.dtype)
        self._pack([Piece(module)], columns)
        return self._linear(columns, [Piece(module)], module.out_features)

    def _linear(self, columns: Sequence[Columns], pieces: Sequence[Piece], count: int) -> lib.Linear:
        bias = None
        if any(p.module.bias is not None for p in pieces):
            parts = [
                torch.zeros(p.size) if p.module.bias is None else p.module.bias.detach()[p.first : p.first + p.size].float()
                for p in pieces
            ]
            bias = torch.cat(parts)
            self._kept.append(bias)
        first = columns[0]
        return lib.Linear(
            packed=first.packed.data_ptr(), bias=lib.pointer(bias), columns=count, depth=first.depth, panel_stride=1
        )

    def _norm(self, norm: NormRecipe) -> lib.Norm:
        weight = norm.module.weight.detach().float() + float(norm.plus_one)
        bias = getattr(norm.module, "bias", None)
        bias = None if bias is None else bias.detach().float()
        self._kept += [weight, bias]
        return lib.Norm(weight=weight.data_ptr(), bias=lib.pointer(bias), eps=norm.eps, centred=norm.centred)

    def _grow(self, positions: int) -> None:
        """Rotary tables for that many positions."""
        self._tables.clear()
        for struct, recipe in zip(self._layers, self._recipes, strict=True):
            struct.rotary_positions = positions
            if recipe.rotary is not None:
                cos, sin = self._table(recipe.rotary, positions)
                struct.cos, struct.sin, struct.rotary_dim = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]

    def _table(self, rotary: RotaryRecipe, positions: int) -> tuple[Tensor, Tensor]:
        if rotary.key not in self._tables:
            cos, sin = rotary.table(positions)
            self._tables[rotary.key] = cos.float().contiguous(), sin.float().contiguous()
        return self._tables[rotary.key]
