"""Paged attention against float64, by the unified and the split kernel.

Caches are NaN wherever a request has stored nothing, and a block table's entries outside the pages that a request
needs are numbers that no cache has: what is read from there shows, or crashes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_cb.kernels.triton import paged_attention as op

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
WILD = 2**31 - 1  # no block has this number
UNTOUCHED = 123.0
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)
each_kernel = pytest.mark.parametrize("num_splits", [1, 4], ids=["unified", "split"])


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repairs Triton's interpreter, which multiplies the bits of bfloat16."""
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter as own

    usual_dot = own.InterpreterBuilder.create_dot

    def dot(self, a, b, *rest) -> Any:
        if a.dtype == bfloat16:
            bits = (own._convert_float(x.data, bfloat16, float32, None) for x in (a, b))
            a, b = (own.TensorHandle(x.view("f4"), float32) for x in bits)
        return usual_dot(self, a, b, *rest)

    monkeypatch.setattr(own.InterpreterBuilder, "create_dot", dot)


def exact(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, options: dict[str, Any]) -> Tensor:
    """Attention of one request in float64: q `[T, Hq, D]` from position `start` on, k and v `[L, Hkv, D]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->htl", q.double(), k) * scale
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
        scores = torch.cat([scores, sinks.double().cpu()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("htl,lhd->thd", scores.softmax(-1)[..., : len(k)], v)


@dataclass
class Step:
    """One step of requests with `lengths` keys, whose last `counts` tokens are new: what is given, and what is right.

    Everything is drawn on the CPU and moved to `device`; q, caches and out lie in larger tensors, at odd strides.
    """

    device: torch.device
    lengths: list[int]
    counts: list[int]
    group: int = 3
    num_kv_heads: int = 2
    dim: int = 32
    v_dim: int = 32
    page: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    scales: tuple[Tensor, Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stored, heads = self.kv_dtype or self.dtype, self.num_kv_heads
        needed = [-(-n // self.page) for n in self.lengths]
        blocks = torch.randperm(sum(needed) + 2, generator=torch.manual_seed(sum(needed))).int()
        shape = (sum(needed) + 2, self.page, heads)
        k_cache = torch.full((*shape, self.dim + 16), float("nan")).to(stored)[..., : self.dim]
        v_cache = torch.full((shape[0], 2, *shape[1:], self.v_dim), float("nan")).to(stored)[:, 1]
        self.block_table = torch.full((len(needed), max(needed) + 1), WILD, dtype=torch.int32)
        k_scale, v_scale = self.scales or (torch.ones(1), torch.ones(1))
        wants = []
        for r, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            k, v = (torch.randn(length, heads, n).to(stored) for n in (self.dim, self.v_dim))
            own, blocks = blocks[: needed[r]], blocks[needed[r] :]
            at = torch.arange(length)
            for cache, x in ((k_cache, k), (v_cache, v)):
                if stored.itemsize == 1:  # indexing does not know float8
                    cache, x = cache.view(torch.uint8), x.view(torch.uint8)
                cache[own[at // self.page].long(), at % self.page] = x
            self.block_table[r, : needed[r]] = own
            oldest = max([0, *(length - count - w + 1 for w in [self.options.get("window")] if w)])
            if chunk := self.options.get("chunk"):
                oldest = max(oldest, (length - count) // chunk * chunk)
            self.block_table[r, : oldest // self.page] = -WILD
            q = torch.randn(count, heads * self.group, self.dim).to(self.dtype)
            keys, values = k.float() * k_scale[:, None], v.float() * v_scale[:, None]
            wants.append((q, exact(q, keys, values, length - count, self.dim**-0.5, self.options)))
        self.want = torch.cat([want for _, want in wants])
        q = torch.cat([q for q, _ in wants])
        self.q = torch.cat([q, q], 1).to(self.device)[:, : q.shape[1]]
        self.k_cache, self.v_cache = k_cache.to(self.device), v_cache.to(self.device)
        self.cu_seqlens_q = torch.tensor([0, *self.counts]).cumsum(0).int()
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)

    def run(self, num_splits: int | None = None, **changes: Any) -> Tensor:
        """The kernels' output `[T, Hq, Dv]`; `changes` replace arguments."""
        out = torch.full((*self.q.shape[:2], self.v_dim + 8), UNTOUCHED, dtype=self.dtype, device=self.device)
        scales = self.scales or (None, None)
        arguments: dict[str, Any] = dict(
            q=self.q,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            block_table=self.block_table,
            cu_seqlens_q=self.cu_seqlens_q,
            seq_lens=self.seq_lens,
            max_seqlen_q=max(self.counts),
            scale=self.dim**-0.5,
            k_scale=scales[0],
            v_scale=scales[1],
            num_splits=num_splits,
            out=out[..., : self.v_dim],
            **self.options,
        )
        arguments |= changes
        moved = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        got = op.paged_attention(**moved)
        assert (out[..., self.v_dim :] == UNTOUCHED).all()
        return got.cpu()

    def check(self, num_splits: int | None = None, **changes: Any) -> None:
        got = self.run(num_splits, **changes)
        assert got.isfinite().all()
        assert (got.double() - self.want).abs().max() <= TOLERANCE[self.dtype] * self.want.abs().max(), self


@each_kernel
@each_dtype
def test_shapes(device: torch.device, dtype: torch.dtype, num_splits: int) -> None:
    """Random ones: groups, head sizes, pages, windows, chunks, soft-caps, sinks; prompts and decodes in one step."""
    draw = random.Random(f"{dtype} {num_splits}")
    for dim, group in ((32, 4), (80, 7), (64, 1)):
        lengths = [draw.randint(1, 20), draw.randint(1, 90), draw.randint(130, 260)]
        options: dict[str, Any] = dict(
            window=draw.choice([None, 8, 40]), chunk=draw.choice([None, 16, 100]), softcap=draw.choice([None, 20.0])
        )
        if draw.random() < 0.5:
            options["sinks"] = torch.randn(group, generator=torch.Generator().manual_seed(1))
        counts = [min(n, draw.choice([1, 3, 12])) for n in lengths]
        shape = dict(group=group, num_kv_heads=1, dim=dim, v_dim=draw.choice([dim, 16, 40]), dtype=dtype)
        Step(device, lengths, counts, page=draw.choice([16, 32, 48]), options=options, **shape).check(num_splits)


@each_kernel
@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129])
def test_lengths_around_the_edges_of_pages_and_tiles(device: torch.device, length: int, num_splits: int) -> None:
    Step(device, [length, 3], [1, 3], num_kv_heads=1, group=1, dim=16, v_dim=16).check(num_splits)


@pytest.mark.parametrize("dim,v_dim", [(96, 96), (112, 112), (192, 128), (256, 256), (16, 256)])
def test_head_sizes(device: torch.device, dim: int, v_dim: int) -> None:
    for num_splits in (1, 2):
        Step(device, [70, 9], [2, 9], 8, 1, dim, v_dim, dtype=torch.bfloat16).check(num_splits)


@pytest.mark.parametrize("page", [16, 32, 48, 64, 128, 256])
def test_page_sizes(device: torch.device, page: int) -> None:
    for num_splits in (1, 2):
        Step(device, [300, 40], [1, 6], 2, 1, 16, 16, page, options=dict(window=150)).check(num_splits)


@each_kernel
@pytest.mark.parametrize("options", [dict(window=1), dict(window=20), dict(chunk=32), dict(window=20, chunk=50)])
def test_keys_that_no_query_sees_are_not_read(device: torch.device, options: dict[str, int], num_splits: int) -> None:
    """A tile of prompt tokens reaches over the edges of windows and chunks; entries before the first are wild."""
    Step(device, [200, 77], [1, 25], 3, 1, 16, 16, options=options).check(num_splits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("native", [False, True], ids=["bits", "native"])
def test_float8_cache(device: torch.device, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native and device.type == "cuda" and not op._has_float8(device):
        pytest.skip("this GPU has no e4m3")
    monkeypatch.setattr(op, "_has_float8", lambda _: native)
    kept: dict[str, Any] = dict(dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    kept["scales"] = torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.25])
    for options, num_splits in (({}, 1), ({}, 2), (dict(softcap=5.0), 1)):
        Step(device, [100, 5], [1, 3], options=options, **kept).check(num_splits)


def test_every_float8_number_is_read_right(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the hardware has no e4m3. With one key the output is its value."""
    monkeypatch.setattr(op, "_has_float8", lambda _: False)
    bits = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)  # all but the NaNs
    v_cache = bits.to(device).view(torch.float8_e4m3fn).view(1, 1, 1, 256)
    one = torch.ones(1, dtype=torch.int32, device=device)
    tables = (one[None] - 1, torch.cat([one - 1, one]), one)
    got = op.paged_attention(torch.ones(1, 1, 256, device=device), torch.zeros_like(v_cache), v_cache, *tables, 1, 1.0)
    assert torch.equal(got.flatten(), v_cache.float().flatten())


def test_queries_too_large_for_float16(device: torch.device) -> None:
    """With which e4m3 is multiplied: they stay finite, and NaN stays NaN."""
    step = Step(device, [20, 9], [1, 1], 1, 1, 16, 16, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    step.k_cache = torch.zeros_like(step.k_cache.float()).to(step.k_cache.dtype)
    step.q[0], step.q[1] = 1e6, float("nan")
    assert step.run(1).isfinite().flatten(1).all(1).tolist() == [True, False]


@each_kernel
def test_padding_is_left_alone(device: torch.device, num_splits: int) -> None:
    """Tokens past the last request, tokens of a request with no keys, and requests without tokens."""
    step, rows = Step(device, [90, 20], [1, 3], dim=16, v_dim=16), torch.full((3, 7), WILD, dtype=torch.int32)
    out = torch.full((8, 6, 16), UNTOUCHED, device=device)
    got = step.run(
        num_splits,
        q=torch.cat([step.q, step.q]),
        block_table=torch.cat([step.block_table[:1], rows[:1], step.block_table[1:], rows[1:]]),
        cu_seqlens_q=torch.tensor([0, 1, 1, 4, 6, 6], dtype=torch.int32),
        seq_lens=torch.tensor([90, 50, 20, 0, 0], dtype=torch.int32),
        out=out,
    )
    assert torch.allclose(got[:4].double(), step.want, atol=1e-5)
    assert (out[4:] == UNTOUCHED).all()


@pytest.mark.parametrize("group,count,v_dim", [(4, 1, 256), (71, 1, 16), (8, 5, 16)])
def test_many_rows_and_many_pieces(device: torch.device, group: int, count: int, v_dim: int) -> None:
    """More than a tile holds, or a merge takes at a time."""
    options = dict(sinks=torch.linspace(-1, 3, group), softcap=3.0)
    step = Step(device, [600, 20], [count, 2], group, 1, 16, v_dim, options=options)
    step.check(1)
    step.check(12)


@each_kernel
def test_more_requests_than_are_looked_at_together(device: torch.device, num_splits: int) -> None:
    step = Step(device, [200, 40], [1, 1], 1, 1, 16, 16)
    table, lens = torch.full((130, 14), WILD, dtype=torch.int32), torch.full((130,), 9, dtype=torch.int32)
    table[[100, 129]], lens[[100, 129]] = step.block_table, step.seq_lens
    cu_seqlens_q = torch.tensor([0] * 101 + [1] * 29 + [2], dtype=torch.int32)
    step.check(num_splits, block_table=table, seq_lens=lens, cu_seqlens_q=cu_seqlens_q)


def test_long_requests_get_the_pieces(device: torch.device) -> None:
    """Key tiles are 32 keys: the requests have 20, 1, 1 and 2, that is 24 in 4 pieces of at most 6: 4, 1, 1 and 1."""
    step, rows = Step(device, [640, 5, 20, 64], [1] * 4, 1, 1, 16, 16), (4 + 4) * 16  # slots of 16 rows
    size = op.workspace_size(step.q, step.k_cache, step.v_cache, step.block_table, 1, num_splits=4)
    assert size == rows * (16 + 1)
    workspace = torch.full((size,), float("nan"), device=device)
    step.check(4, workspace=workspace)
    used = workspace[rows * 16 :].view(8, 16)[:, 0].isfinite().tolist()
    assert used == [True] * 4 + [False] * 4, "a request of one piece leaves none"


@each_kernel
def test_a_launch_stays_right_when_lengths_change(device: torch.device, num_splits: int) -> None:
    """Same shapes, other lengths, counts and tables: replays of one captured graph, where there is a GPU."""
    given = ([300, 1, 40], [1, 1, 2]), ([2, 290, 310], [2, 1, 1]), ([33, 200, 7], [1, 3, 0])
    steps = [Step(device, *each, 4, 1, 16, 16) for each in given]
    sizes = dict(q=4, k_cache=50, v_cache=50, block_table=3, cu_seqlens_q=4, seq_lens=3)
    held = {name: padded(getattr(steps[0], name), size).to(device) for name, size in sizes.items()}
    out = torch.empty(4, 4, 16, device=device)

    def call() -> None:
        op.paged_attention(**held, max_seqlen_q=3, scale=0.25, num_splits=num_splits, out=out)

    replay = captured(call) if device.type == "cuda" else call
    for step in steps:
        for name, size in sizes.items():
            held[name].copy_(padded(getattr(step, name), size))
        replay()
        assert torch.allclose(out[: len(step.want)].cpu().double(), step.want, atol=1e-5)


def padded(x: Tensor, size: int) -> Tensor:
    """To `size` rows; a block table also to 21 columns."""
    if x.dim() == 2:
        x = torch.nn.functional.pad(x, (0, 21 - x.shape[1]), value=WILD)
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, size - len(x)))


def captured(call: Any) -> Any:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
