"""Paged attention against float64: every variant, mixed steps, odd shapes, and pages whose unused part is NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cpu_variants import each_dtype, each_variant, needs_library, table_of, workspace
from torch import Tensor

from hf_cb.kernels.cpu import library as lib
from hf_cb.kernels.cpu import paged_attention as op

pytestmark = needs_library
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.int8: 6e-2}


def exact(q: Tensor, k: Tensor, v: Tensor, start: int, options: dict[str, Any]) -> Tensor:
    """Attention of one request in float64: q `[T, Hq, D]` from position `start` on, k and v `[L, Hkv, D]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->htl", q.double(), k) * q.shape[-1] ** -0.5
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    query, key = torch.arange(start, start + len(q))[:, None], torch.arange(len(k))[None]
    seen = key <= query
    if window := options.get("window"):
        seen &= key > query - window
    if chunk := options.get("chunk"):
        seen &= key // chunk == query // chunk
    scores = scores.masked_fill(~seen, float("-inf"))
    if (sinks := options.get("sinks")) is not None:
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], -1)
    return torch.einsum("htl,lhd->thd", scores.softmax(-1)[..., : len(k)], v)


@dataclass
class Traffic:
    """Requests with their keys and values, and a cache with random blocks that starts as NaN."""

    lengths: list[int]
    num_heads: int = 6
    num_kv_heads: int = 2
    dim: int = 64
    v_dim: int = 64
    block_size: int = 32
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        blocks = [-(-n // self.block_size) for n in self.lengths]
        stored = self.kv_dtype or self.dtype
        shape = (self.num_kv_heads, self.dim, self.v_dim, self.block_size)
        self.cache = op.allocate(sum(blocks) + 4, *shape, stored)
        if stored != torch.int8:
            self.cache.k.fill_(float("nan"))
            self.cache.v.fill_(float("nan"))
        order = (torch.randperm(sum(blocks) + 3)[: sum(blocks)] + 1).int()
        self.table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for row, part in zip(self.table, order.split(blocks), strict=True):
            row[: len(part)] = part
        self.k = [torch.randn(n, self.num_kv_heads, self.dim).to(self.dtype) for n in self.lengths]
        self.v = [torch.randn(n, self.num_kv_heads, self.v_dim).to(self.dtype) for n in self.lengths]
        heads = (self.num_heads, self.num_kv_heads, self.dim, self.v_dim, self.block_size)
        self.layer = op.describe(self.cache, *heads, self.dtype, self.dim**-0.5, **self.options)

    def step(self, table: lib.Table, starts: list[int], ends: list[int], threads: int = 2) -> tuple[Tensor, Tensor]:
        """One mixed step over tokens [start, end) of each request: what the kernel gives, and what is right."""
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        q = torch.randn(sum(counts), self.num_heads, self.dim, generator=torch.Generator().manual_seed(5)).to(
            self.dtype
        )
        parts = list(zip(range(len(starts)), starts, ends, strict=True))
        at = [torch.arange(s, e) for _, s, e in parts]
        slots = [
            self.table[r][p // self.block_size].long() * self.block_size + p % self.block_size
            for (r, _, _), p in zip(parts, at, strict=True)
        ]
        got = op.paged_attention(
            table,
            workspace(),
            self.layer,
            q,
            torch.cat([self.k[r][s:e] for r, s, e in parts]),
            torch.cat([self.v[r][s:e] for r, s, e in parts]),
            torch.cat(slots),
            self.table,
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor(ends, dtype=torch.int32),
            threads,
        )
        want = [
            exact(rows, self.k[r][:e], self.v[r][:e], s, self.options)
            for rows, (r, s, e) in zip(q.split(counts), parts, strict=True)
        ]
        return got, torch.cat(want)

    def check(self, table: lib.Table, starts: list[int]) -> None:
        """First everything before `starts`, then the rest."""
        if max(starts) > 0:
            self.step(table, [0] * len(starts), starts)
        got, want = self.step(table, starts, self.lengths)
        limit = TOLERANCE[self.kv_dtype or self.dtype]
        assert got.isfinite().all()
        assert (got.double() - want).abs().max() <= limit * want.abs().max(), self


@each_variant
@each_dtype
def test_shapes(variant: str, dtype: torch.dtype) -> None:
    """Random ones: heads, sizes, pages, windows, chunks, soft-caps, sinks; prompts, chunks and decodes in one step."""
    draw, table = random.Random(f"{variant} {dtype}"), table_of(variant)
    torch.manual_seed(0)
    for _ in range(25):
        kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 3, 4, 7, 8])
        dim = draw.choice([7, 8, 16, 24, 64, 80, 128])
        lengths = [draw.choice([draw.randint(1, 40), draw.randint(1, 600)]) for _ in range(draw.randint(1, 5))]
        options: dict[str, Any] = dict(
            window=draw.choice([None, None, 8, 40]),
            chunk=draw.choice([None, None, 16, 100]),
            softcap=draw.choice([None, 20.0]),
        )
        if draw.random() < 0.3:
            options["sinks"] = torch.randn(kv_heads * group)
        traffic = Traffic(
            lengths,
            kv_heads * group,
            kv_heads,
            dim,
            draw.choice([dim, 5, 40]),
            draw.choice([4, 5, 16, 32, 48, 64]),
            dtype,
            draw.choice([None, None, torch.int8]),
            options,
        )
        traffic.check(table, [draw.choice([n - 1, draw.randint(0, n - 1)]) for n in lengths])


@each_variant
@pytest.mark.parametrize("length", [1, 31, 32, 33, 255, 256, 257, 511, 513])
def test_lengths_around_the_edges(variant: str, length: int) -> None:
    for block_size in (16, 32):
        traffic = Traffic([length, 3], block_size=block_size, dtype=torch.bfloat16)
        traffic.check(table_of(variant), [length - 1, 0])


@each_variant
def test_one_long_request(variant: str) -> None:
    for dim in (64, 256):
        Traffic([4096], num_heads=4, dim=dim, v_dim=dim).check(table_of(variant), [4090])


@each_variant
@each_dtype
def test_a_row_depends_on_its_request_alone(variant: str, dtype: torch.dtype) -> None:
    """Bit for bit: alone, with others, in a longer chunk, with more threads."""
    table = table_of(variant)
    traffic = Traffic([700, 90, 300, 5], num_heads=6, num_kv_heads=2, dtype=dtype)
    traffic.step(table, [0, 0, 0, 0], traffic.lengths)
    last, _ = traffic.step(table, [690, 80, 290, 0], traffic.lengths)
    more, _ = traffic.step(table, [690, 80, 290, 0], traffic.lengths, threads=3)
    assert torch.equal(last, more)
    alone = Traffic([700], num_heads=6, num_kv_heads=2, dtype=dtype)
    alone.k, alone.v = traffic.k[:1], traffic.v[:1]
    alone.step(table, [0], [690])
    got, _ = alone.step(table, [690], [700], threads=1)
    assert torch.equal(got, last[:10])


def test_a_token_without_a_slot_is_not_stored() -> None:
    traffic = Traffic([4], block_size=4)
    before = traffic.cache.k.clone()
    table, one = table_of("portable"), torch.randn(1, 6, 64)
    cu, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    kv = torch.randn(1, 2, 64)
    op.paged_attention(table, workspace(), traffic.layer, one, kv, kv, torch.tensor([-1]), traffic.table, cu, lens, 1)
    assert torch.equal(before.nan_to_num(), traffic.cache.k.nan_to_num())


def test_heads_that_are_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="refused"):
        Traffic([3], dim=520, v_dim=8).step(table_of("portable"), [0], [3])
