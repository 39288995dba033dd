"""The packed product against float64, for every variant, type and awkward size."""

from __future__ import annotations

import pytest
import torch
from cpu_variants import each_dtype, each_variant, needs_library, table_of, workspace

from hf_cb.kernels.cpu.linear import in_turns, side_by_side

pytestmark = needs_library
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# rows, columns, depth: around pieces of 12 and 6 rows, panels of 32 columns, and pairs
SIZES = [(1, 32, 16), (2, 1, 1), (5, 70, 33), (12, 31, 8), (13, 33, 576), (24, 96, 40), (25, 64, 7), (131, 100, 48)]


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-9))


@each_variant
@each_dtype
def test_weights_beside_each_other(variant: str, dtype: torch.dtype) -> None:
    table, scratch = table_of(variant), workspace()
    for rows, columns, depth in SIZES:
        torch.manual_seed(rows)
        weight, x = torch.randn(columns, depth).to(dtype), torch.randn(rows, depth).to(dtype)
        bias = torch.randn(columns)
        cut = columns // 3
        pieces = [p for p in side_by_side([cut, columns - cut], depth, dtype) if p.columns]
        got = []
        for piece in pieces:
            own = slice(piece.first_column, piece.first_column + piece.columns)
            piece.pack(table, weight[own].contiguous(), 2)
            piece.bias = bias[own].contiguous()
            piece.__post_init__()
        for piece in pieces:
            got.append(piece.linear(table, scratch, x, 2))
        want = x.double() @ weight.double().t() + bias.double()
        assert off(torch.cat(got, -1), want) < TOLERANCE[dtype], (rows, columns, depth)
        assert torch.equal(torch.cat([piece.unpack(table, 2) for piece in pieces]), weight)


@each_variant
@each_dtype
def test_weights_in_turns_and_rows_by_index(variant: str, dtype: torch.dtype) -> None:
    table, scratch = table_of(variant), workspace()
    x = torch.randn(7, 24).to(dtype)
    gate, up = (torch.randn(45, 24).to(dtype) for _ in range(2))
    packed = in_turns(45, 24, dtype)
    for columns, weight in zip(packed, (gate, up), strict=True):
        columns.pack(table, weight, 2)
    for columns, weight in zip(packed, (gate, up), strict=True):
        want = x.double() @ weight.double().t()
        assert off(columns.linear(table, scratch, x, 2), want) < TOLERANCE[dtype]
        ids = torch.tensor([[3, 44, 0], [3, 31, 32]])
        assert torch.equal(columns.embed(table, ids, 2), weight[ids])
        assert torch.equal(columns.unpack(table, 1), weight)


@each_variant
@each_dtype
def test_a_row_does_not_depend_on_the_rows_beside_it(variant: str, dtype: torch.dtype) -> None:
    table, scratch = table_of(variant), workspace()
    x, (columns,) = torch.randn(50, 96).to(dtype), side_by_side([80], 96, dtype)
    columns.pack(table, torch.randn(80, 96).to(dtype), 2)
    whole = columns.linear(table, scratch, x, 2)
    for rows in (slice(0, 1), slice(3, 16), slice(20, 50)):
        for threads in (1, 2, 3):
            assert torch.equal(columns.linear(table, scratch, x[rows], threads), whole[rows])


@each_variant
@each_dtype
def test_rows_with_a_gap_between(variant: str, dtype: torch.dtype) -> None:
    """An odd one: pairs of bfloat16 do not lie then where a 32-bit word may."""
    table, (columns,) = table_of(variant), side_by_side([40], 24, dtype)
    weight, x = torch.randn(40, 24).to(dtype), torch.randn(5, 27).to(dtype)[:, 1:25]
    columns.pack(table, weight, 2)
    assert off(columns.linear(table, workspace(), x, 2), x.double() @ weight.double().t()) < TOLERANCE[dtype]


def test_every_bit_comes_back() -> None:
    """Also those of NaNs, infinities and denormals."""
    table = table_of("portable")
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
        (columns,) = side_by_side([256], 256, dtype)
        columns.pack(table, weight, 2)
        assert torch.equal(columns.unpack(table, 2).view(torch.int16), weight.view(torch.int16))


def test_a_weight_of_another_shape_is_refused() -> None:
    (columns,) = side_by_side([8], 4, torch.float32)
    with pytest.raises(ValueError, match="8 by 4"):
        columns.pack(table_of("portable"), torch.randn(4, 8), 1)
