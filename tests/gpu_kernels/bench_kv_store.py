"""How near store_kv comes to the memory's bandwidth: `python bench_kv_store.py BYTES_PER_S FLOP_PER_S`."""

from __future__ import annotations

import json
import sys

import torch

# tokens, KV heads, head size, value size: decodes and prompt chunks of Llama-3-8B, Qwen2.5-0.5B, DeepSeek's MLA
SHAPES = [(64, 8, 128, 128), (256, 8, 128, 128), (8192, 8, 128, 128), (8192, 2, 64, 64), (8192, 1, 576, 512)]
PAGE = 16


def paper(tokens: int, heads: int, dim: int, v_dim: int, itemsize: int, cache_itemsize: int) -> dict[str, int]:
    """Bytes that must move, slots included, and operations: a division and a rounding for each fp8 element."""
    elements = tokens * heads * (dim + v_dim)
    return dict(
        bytes=elements * (itemsize + cache_itemsize) + 8 * tokens,
        flops=2 * elements if cache_itemsize < itemsize else 0,
    )


def measure(bandwidth: float, rate: float) -> list[dict]:
    """Times on the GPU. `floor` is the share of the time that the bytes (at `bandwidth`, bytes/s) or the operations (at
    `rate`, flop/s) would take at least."""
    import triton

    from hf_cb.kernels.triton.kv_store import store_kv

    results = []
    for tokens, heads, dim, v_dim in SHAPES:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            fused = torch.randn(tokens, heads * (dim + v_dim), device="cuda").bfloat16()
            k = fused[:, : heads * dim].view(tokens, heads, dim)
            v = fused[:, heads * dim :].view(tokens, heads, v_dim)
            blocks = 2 * tokens // PAGE + 1
            k_cache, v_cache = (torch.empty(blocks, PAGE, heads, d, device="cuda", dtype=dtype) for d in (dim, v_dim))
            scale = None if dtype == torch.bfloat16 else torch.full((1,), 0.5, device="cuda")
            slots = torch.randperm(blocks * PAGE, device="cuda")[:tokens]
            seconds = 1e-3 * triton.testing.do_bench(
                lambda k=k, v=v, to=(k_cache, v_cache, slots), scale=scale: store_kv(
                    k, v, *to, k_scale=scale, v_scale=scale
                ),
                return_mode="median",
            )
            cost = paper(tokens, heads, dim, v_dim, 2, dtype.itemsize)
            least = max(cost["bytes"] / bandwidth, cost["flops"] / rate)
            shape = dict(tokens=tokens, heads=heads, dim=dim, v_dim=v_dim, cache=str(dtype))
            results.append(dict(kernel="store_kv", **shape, **cost, seconds=seconds, floor=least / seconds))
    return results


if __name__ == "__main__":
    for result in measure(*map(float, sys.argv[1:3])):
        print(json.dumps(result))
