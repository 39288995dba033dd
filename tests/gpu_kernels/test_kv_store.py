"""Keys and values to their slots: odd shapes and strides, slots that are skipped, fp8 bit for bit, far addresses."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_cb.kernels.triton.kv_store import store_kv

E4M3 = torch.float8_e4m3fn


def caches(blocks: int, page: int, heads: int, dim: int, v_dim: int, dtype: torch.dtype, device: torch.device):
    """Filled with something that shows where it was overwritten."""
    k, v = (torch.zeros(blocks, page, heads, d, device=device) for d in (dim, v_dim))
    return (k - 7).to(dtype), (v - 9).to(dtype)


def expected(new: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    want = cache.clone().reshape(-1, *cache.shape[2:])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot] = new[token]
    return want.view(cache.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "dim", "v_dim", "page"),
    [(1, 64, 64, 16), (2, 80, 80, 32), (3, 96, 40, 1), (8, 128, 512, 5), (1, 576, 512, 64)],
)
def test_each_token_is_written_to_its_slot_alone(heads, dim, v_dim, page, dtype, device) -> None:
    torch.manual_seed(0)
    blocks, tokens = 7 + 8 // page, 7
    slots = (torch.randperm((blocks - 1) * page) + page)[:tokens].to(device)
    slots[2] = -1
    # in one fused projection, as the modules give them
    fused = torch.randn(tokens, 4 + heads * (dim + v_dim), device=device).to(dtype)
    k = fused[:, 4 : 4 + heads * dim].view(tokens, heads, dim)
    v = fused[:, 4 + heads * dim :].view(tokens, heads, v_dim)
    for index in (torch.int64, torch.int32):
        k_cache, v_cache = caches(blocks, page, heads, dim, v_dim, dtype, device)
        want = expected(k, k_cache, slots), expected(v, v_cache, slots)
        store_kv(k, v, k_cache, v_cache, slots.to(index))
        assert torch.equal(k_cache, want[0])
        assert torch.equal(v_cache, want[1])


def test_caches_and_heads_may_lie_apart(device) -> None:
    """Blocks as views of one tensor for keys and values; heads that are strided; pages of a cache kept by heads."""
    k, v = (torch.randn(5, 2, 2, 24, device=device)[:, i] for i in range(2))
    k = k.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.zeros(3, 2, 4, 2, 24, device=device)
    by_heads = torch.zeros(3, 2, 4, 24, device=device).transpose(1, 2)
    slots = torch.tensor([11, 0, 5, 4, -1], device=device)
    want = expected(k, both[:, 0], slots), expected(v, by_heads, slots)
    store_kv(k, v, both[:, 0], by_heads, slots)
    assert torch.equal(both[:, 0], want[0])
    assert torch.equal(by_heads, want[1])
    assert not both[:, 1].any()


def test_fp8_is_rounded_to_the_nearest_and_saturates(device) -> None:
    """Against torch's own conversion: all numbers of e4m3, what lies between, the halves, and what is no number."""
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    halves = (numbers[1:] + numbers[:-1]) / 2
    tiny = halves * 2.0**-10  # below the smallest
    some = torch.cat([numbers, halves, torch.nextafter(halves, numbers[1:]), torch.nextafter(halves, -halves), tiny])
    some = torch.cat([some, torch.tensor([449.0, 464.0, 465.0, 1e9, float("inf"), 1e-40])])
    some = torch.cat([some, -some, torch.tensor([float("nan")])]).to(device)
    x = some.view(1, -1, 1)
    k_cache, v_cache = caches(1, 1, len(some), 1, 1, E4M3, device)
    store_kv(x, -x, k_cache, v_cache, torch.zeros(1, dtype=torch.long, device=device))
    for sign, cache in ((1, k_cache), (-1, v_cache)):
        want = (sign * some).clamp(-448, 448).to(E4M3).view(torch.uint8)[:-1]
        assert torch.equal(cache.view(-1).view(torch.uint8)[:-1], want)
        assert cache.view(-1)[-1].float().isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_divides_by_the_scale_of_the_layer_or_of_the_head(dtype, device) -> None:
    torch.manual_seed(1)
    k, v = (torch.randn(6, 3, 40, device=device).to(dtype) * 100 for _ in range(2))
    slots = torch.tensor([8, 3, -1, 2, 0, 5], device=device)
    one, each = torch.tensor([0.3], device=device), torch.tensor([0.7, 5.0, 0.01], device=device)
    k_cache, v_cache = caches(3, 3, 3, 40, 40, E4M3, device)
    bits = v_cache.view(torch.uint8)  # as a GPU without the type has it
    want = [
        expected((x.float() / scale).clamp(-448, 448).to(E4M3), cache, slots)
        for x, scale, cache in ((k, one, k_cache), (v, each[:, None], v_cache))
    ]
    store_kv(k, v, k_cache, bits, slots, k_scale=one, v_scale=each)
    assert torch.equal(k_cache.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(bits, want[1].view(torch.uint8))


def test_addresses_are_of_64_bits(device) -> None:
    """A cache that spans more than 2^31 elements, of which a block here and there is real."""
    far = 2**31 + 64
    if device.type == "cuda":
        pool = torch.zeros(far + 64, dtype=torch.uint8, device=device)
    else:
        pool = torch.empty(far + 64, dtype=torch.uint8)  # never touched but at its end
    cache = pool.as_strided((3, 2, 1, 16), (far // 2, 16, 16, 1)).view(torch.float8_e4m3fn)
    x = torch.full((1, 1, 16), 3.0, device=device)
    store_kv(x, x, cache, cache, torch.tensor([5], device=device))
    assert (cache[2, 1].float() == 3).all()


def test_no_tokens_and_wrong_arguments(device) -> None:
    k_cache, v_cache = caches(2, 4, 2, 16, 16, torch.float32, device)
    none, slots = torch.zeros(0, 2, 16, device=device), torch.zeros(0, dtype=torch.long, device=device)
    store_kv(none, none, k_cache, v_cache, slots)
    x, slots = torch.zeros(3, 2, 16, device=device), torch.arange(3, device=device)
    with pytest.raises(ValueError, match="contiguous last"):
        store_kv(torch.zeros(3, 16, 2, device=device).mT, x, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="k_cache must be"):
        store_kv(torch.zeros(3, 3, 16, device=device), x, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="allocate the cache in"):
        store_kv(x.half(), x, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="int32 or int64"):
        store_kv(x, x, k_cache, v_cache, slots[:2])
    with pytest.raises(ValueError, match="contiguous"):
        store_kv(x, x, k_cache, v_cache, torch.arange(6, device=device)[::2])
    with pytest.raises(ValueError, match="leave it None"):
        store_kv(x, x, k_cache, v_cache, slots, k_scale=torch.ones(1, device=device))
    with pytest.raises(ValueError, match="1 or 2 elements"):
        store_kv(x, x, k_cache.to(E4M3), v_cache.to(E4M3), slots, k_scale=torch.ones(3, device=device))
    with pytest.raises(ValueError, match="differ"):
        store_kv(x, torch.zeros(2, 2, 16, device=device), k_cache, v_cache, slots)


def test_the_benchmark_counts_the_bytes() -> None:
    """Two tokens of three heads, keys of 4 and values of 6 elements: 60 elements, read and written, and two slots."""
    paper = runpy.run_path(str(Path(__file__).with_name("bench_kv_store.py")))["paper"]
    assert paper(2, 3, 4, 6, 2, 2) == dict(bytes=60 * 4 + 16, flops=0)
    assert paper(2, 3, 4, 6, 2, 1) == dict(bytes=60 * 3 + 16, flops=120)
