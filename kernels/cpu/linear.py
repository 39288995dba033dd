"""Packed matrices: weights as panels of 32 columns, which the CPU kernels read from end to end.

The layout is in `api.h`. Several weights can share a matrix, side by side (query, key, value) or panel by panel in turn
(gate, up); a `Columns` is one of them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_cb.kernels.cpu import library as lib

PANEL = 32


def packed_elements(columns: int, depth: int, dtype: torch.dtype, turns: int = 1) -> int:
    """Elements of a packed matrix of that many columns (of each weight, where `turns` of them take turns)."""
    panels = -(-columns // PANEL) * turns
    return panels * PANEL * (depth + depth % 2 if dtype == torch.bfloat16 else depth)


@dataclass
class Columns:
    """The columns of one weight `[columns, depth]` inside a packed matrix.

    `bias`: None, or float32 `[columns]`.
    """

    packed: Tensor
    columns: int
    depth: int
    first_column: int = 0
    panel_stride: int = 1
    panel_offset: int = 0
    bias: Tensor | None = None
    struct: lib.Linear = field(init=False)

    def __post_init__(self) -> None:
        self.struct = lib.Linear(
            packed=self.packed.data_ptr(),
            bias=lib.pointer(self.bias),
            columns=self.columns,
            depth=self.depth,
            first_column=self.first_column,
            panel_stride=self.panel_stride,
            panel_offset=self.panel_offset,
        )

    def pack(self, table: lib.Table, weight: Tensor, threads: int) -> None:
        """Fills these columns from `weight [columns, depth]`."""
        self._copy(table, weight, False, threads)

    def unpack(self, table: lib.Table, threads: int) -> Tensor:
        """The weight again, bit for bit."""
        weight = torch.empty(self.columns, self.depth, dtype=self.packed.dtype, device="cpu")
        self.unpack_into(table, weight, threads)
        return weight

    def unpack_into(self, table: lib.Table, weight: Tensor, threads: int) -> None:
        """Writes the weight to `weight [columns, depth]`."""
        self._copy(table, weight, True, threads)

    def _copy(self, table: lib.Table, weight: Tensor, back: bool, threads: int) -> None:
        if (
            not weight.is_contiguous()
            or weight.shape != (self.columns, self.depth)
            or weight.dtype != self.packed.dtype
        ):
            raise ValueError(f"A contiguous {self.packed.dtype} weight of {self.columns} by {self.depth} is wanted.")
        table.pack(
            lib.DTYPES[weight.dtype],
            weight.data_ptr(),
            self.columns,
            self.depth,
            self.first_column,
            self.panel_stride,
            self.panel_offset,
            self.packed.data_ptr(),
            int(back),
            threads,
        )

    def linear(self, table: lib.Table, workspace: lib.Workspace, x: Tensor, threads: int) -> Tensor:
        """x `[..., depth]` times the weight's transpose, plus the bias: `[..., columns]`."""
        if x.shape[-1] != self.depth or x.dtype != self.packed.dtype:
            raise ValueError(f"Rows of {self.depth} in {self.packed.dtype} are wanted, not {x.shape[-1]} in {x.dtype}.")
        rows = x.reshape(-1, self.depth)
        if rows.stride(-1) != 1 and rows.numel():
            rows = rows.contiguous()
        out = torch.empty(*x.shape[:-1], self.columns, dtype=x.dtype, device="cpu")
        lib.check(
            table.linear(
                workspace.handle,
                lib.DTYPES[x.dtype],
                rows.data_ptr(),
                rows.stride(0),
                rows.shape[0],
                ctypes.byref(self.struct),
                out.data_ptr(),
                self.columns,
                threads,
            )
        )
        return out

    def embed(self, table: lib.Table, ids: Tensor, threads: int) -> Tensor:
        """Rows of the weight by index: `[..., depth]`. Indices must be inside."""
        out = torch.empty(*ids.shape, self.depth, dtype=self.packed.dtype, device="cpu")
        ids = ids.contiguous()
        table.embed(
            lib.DTYPES[self.packed.dtype],
            ctypes.byref(self.struct),
            ids.data_ptr(),
            ids.numel(),
            out.data_ptr(),
            threads,
        )
        return out


def side_by_side(columns: list[int], depth: int, dtype: torch.dtype) -> list[Columns]:
    """An empty packed matrix for weights of these sizes, one after the other."""
    packed = torch.zeros(packed_elements(sum(columns), depth, dtype), dtype=dtype, device="cpu")
    firsts = [sum(columns[:i]) for i in range(len(columns))]
    return [Columns(packed, n, depth, first) for n, first in zip(columns, firsts, strict=True)]


def in_turns(columns: int, depth: int, dtype: torch.dtype, turns: int = 2) -> list[Columns]:
    """An empty packed matrix for `turns` weights of this size, whose panels alternate."""
    packed = torch.zeros(packed_elements(columns, depth, dtype, turns), dtype=dtype, device="cpu")
    return [Columns(packed, columns, depth, 0, turns, i) for i in range(turns)]
