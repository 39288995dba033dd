"""Tensors of more than 2^31 elements, and steps of more programs than the second axis of a grid holds.

The elements lie far apart in memory of which only what is used is ever there: a mapping without reserve on a CPU, and
on a GPU memory that nobody fills.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_cb.kernels.triton import activation, kv_store, paged_attention, rms_norm, rope_store, sampling

FAR = 2**31 - 2**27 + 16  # elements; what lies twice as far is almost beyond 2^32
Sparse = Callable[..., Tensor]


@pytest.fixture
def sparse(device: torch.device) -> Iterator[Sparse]:
    """Makes a float16 tensor of a shape and strides that reach far, zero where it was never written."""

    def make(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if device.type == "cuda":
            try:
                return torch.empty(size, dtype=torch.float16, device=device).as_strided(shape, strides).zero_()
            except torch.OutOfMemoryError:
                pytest.skip(f"no room for {2 * size / 2**30:.0f} GiB")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return torch.frombuffer(mmap.mmap(-1, 2 * size, flags=flags), dtype=torch.float16).as_strided(shape, strides)

    yield make
    if device.type == "cuda":
        torch.cuda.empty_cache()


def filled(like: Tensor) -> Tensor:
    """The same random values in `like` and, returned, close together."""
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(like.dim())).to(like.device)
    return like.copy_(values).contiguous()


def alike(got: Tensor, want: Tensor) -> bool:
    """Other strides are another build, which may add up in another order."""
    return torch.allclose(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("far", ["block", "slot", "head"])
@pytest.mark.parametrize("num_splits", [1, 4], ids=["unified", "split"])
def test_attention_on_far_blocks(device: torch.device, sparse: Sparse, num_splits: int, far: str) -> None:
    """A cache as large as a GPU's memory, and other layouts of it."""
    places = dict(block=(FAR, 64, 32, 1), slot=(16, FAR // 8, 64, 1), head=(1024, 64, FAR, 1))[far]
    k_cache, v_cache = sparse((3, 16, 2, 16), places), sparse((3, 16, 2, 16), places)
    near = filled(k_cache), filled(v_cache)
    q = torch.randn(5, 6, 16, device=device).half()

    def ints(*values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    given = (ints([2, 1, 0], [1, 2, 0]), ints(0, 2, 5), ints(40, 20), 3, 0.25)
    want = paged_attention.paged_attention(q, *near, *given, num_splits=num_splits)
    assert alike(paged_attention.paged_attention(q, k_cache, v_cache, *given, num_splits=num_splits), want)


@pytest.mark.parametrize("far", ["token", "head"])
@pytest.mark.parametrize("num_splits", [1, 4], ids=["unified", "split"])
def test_attention_of_far_queries(device: torch.device, sparse: Sparse, num_splits: int, far: str) -> None:
    places = (FAR, 16, 1) if far == "token" else (16, FAR, 1)
    q, out = sparse((3, 3, 16), places), sparse((3, 3, 16), places)
    near = filled(q)
    cache = torch.randn(9, 16, 1, 16, device=device).half()
    table = torch.arange(9, dtype=torch.int32, device=device)[None]
    tables = (table, torch.tensor([0, 3], dtype=torch.int32, device=device), table[0, 8:] + 132, 3, 0.25)
    want = paged_attention.paged_attention(near, cache, cache, *tables, num_splits=num_splits)
    paged_attention.paged_attention(q, cache, cache, *tables, num_splits=num_splits, out=out)
    assert alike(out, want)


@pytest.mark.parametrize("far", ["block", "slot", "head"])
def test_stores_to_far_blocks(device: torch.device, sparse: Sparse, far: str) -> None:
    """By store_kv and by rope_store, from keys and values that are far apart too."""
    places = dict(block=(FAR, 64, 32, 1), slot=(16, FAR // 2, 64, 1), head=(1024, 64, FAR, 1))[far]
    new_places = (FAR, 32, 1) if far == "block" else (32, FAR, 1)
    slots = torch.tensor([2 * 4 + 3, 1, 4 + 2], device=device)
    k, v, q = (sparse((3, 2, 16), new_places) for _ in range(3))
    near_k, near_v, near_q = filled(k), filled(v) + 1, filled(q) - 1
    v += 1
    q -= 1
    turns = torch.randn(3, 16, device=device).half()
    for store in (
        lambda q, *rest: kv_store.store_kv(*rest, slots),
        lambda q, *rest: rope_store.rope_store(q, rest[0], rest[1], turns, turns, *rest[2:], slots),
    ):
        caches = [sparse((3, 4, 2, 16), places) for _ in range(2)]
        wants = [torch.zeros(3, 4, 2, 16, device=device).half() for _ in range(2)]
        store(near_q, near_k, near_v, *wants)
        store(q, k, v, *caches)
        assert all(alike(cache, want) for cache, want in zip(caches, wants, strict=True))
        assert alike(q, near_q)


def test_rows_far_apart(device: torch.device, sparse: Sparse) -> None:
    """Hidden states, gates and logits."""
    x, out = sparse((3, 2, 16), (16, FAR, 1)), sparse((3, 2, 16), (16, FAR, 1))
    want = rms_norm.rms_norm(filled(x), None, 1e-6)
    rms_norm.rms_norm(x, None, 1e-6, out=out)
    assert alike(out, want)

    rows = sparse((3, 64), (FAR, 1))
    near = filled(rows)
    out = sparse((3, 32), (FAR, 1))
    activation.act_and_mul(rows, out=out)
    assert alike(out, activation.act_and_mul(near))

    assert torch.equal(sampling.argmax(rows), near.argmax(1))
    counts = torch.arange(3, device=device)
    floats = dict(temperature=torch.ones(3, device=device), top_p=torch.full((3,), 0.9, device=device))
    settings = dict(**floats, min_p=torch.zeros(3, device=device), top_k=counts.int() + 5)
    settings |= dict(seeds=counts, positions=counts)
    assert torch.equal(sampling.sample(rows, **settings), sampling.sample(near, **settings))


def test_grids_have_one_axis(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, which holds 2^31 - 1 programs; the others hold 65,535, less than a step may have tokens."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: grids.append(grid)

    modules = (activation, kv_store, paged_attention, rms_norm, rope_store, sampling)
    kernels = [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel") and not isinstance(value, FunctionType)
    ]
    for module, name in kernels:
        monkeypatch.setattr(module, name, Kernel())
    tokens = 70_000
    x = torch.zeros(1, 2, 16, device=device).expand(tokens, 2, 16)
    cache = torch.zeros(2, 4, 2, 16, device=device)
    slots = torch.zeros(tokens, dtype=torch.int64, device=device)
    ints = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    turns, flat = torch.zeros(1, 16, device=device).expand(tokens, 16), x[:, 0]
    out = torch.empty(tokens, 2, 16, device=device)
    for num_splits in (1, 2):
        options: dict[str, Any] = dict(num_splits=num_splits, out=out)
        table = ints[:1, None].expand(tokens, 1)
        paged_attention.paged_attention(x, cache, cache, table, ints, ints[1:], 1, 1.0, **options)
    kv_store.store_kv(x, x, cache, cache, slots)
    rope_store.rope_store(x, x, x, turns, turns, cache, cache, slots)
    rms_norm.rms_norm(flat, None, 1e-6)
    activation.act_and_mul(flat)
    sampling.argmax(flat)
    row = torch.ones(tokens, device=device)
    settings = dict(temperature=row, top_p=row, min_p=row, top_k=ints[1:], seeds=slots, positions=slots)
    sampling.sample(flat, **settings)
    assert len(grids) == len(kernels) and all(len(grid) == 1 for grid in grids)
    assert sum(grid[0] >= tokens for grid in grids) == len(kernels) - 1, "rows of rms_norm share programs"
