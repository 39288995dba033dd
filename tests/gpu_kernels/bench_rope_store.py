"""How near rope_store comes to the memory's bandwidth: `python bench_rope_store.py BYTES_PER_S FLOP_PER_S`."""

from __future__ import annotations

import json
import sys

import torch

# tokens, query heads, KV heads, head size, elements that turn, normalised heads: Llama-3-8B, Qwen3-8B, GLM-4-9B
SHAPES = [
    (64, 32, 8, 128, 128, False),
    (256, 32, 8, 128, 128, True),
    (8192, 32, 8, 128, 128, False),
    (8192, 32, 8, 128, 128, True),
    (8192, 32, 2, 128, 64, False),
]
PAGE = 16


def paper(tokens: int, heads: int, kv_heads: int, dim: int, turning: int, norm: bool, itemsize: int) -> dict[str, int]:
    """Bytes that must move (what turns of the queries, or all of them if normalised, both ways; keys and values both
    ways; one factor for each pair; slots) and operations: six a pair, and four an element for a norm."""
    queries = tokens * heads * (dim if norm else turning)
    keys = tokens * kv_heads * dim
    bytes_ = itemsize * (2 * queries + 4 * keys + tokens * turning) + 8 * tokens
    flops = 3 * tokens * (heads + kv_heads) * turning + (4 * (queries + keys) if norm else 0)
    return dict(bytes=bytes_, flops=flops)


def measure(bandwidth: float, rate: float) -> list[dict]:
    """Times on the GPU. `floor` is the share of the time that the bytes (at `bandwidth`, bytes/s) or the operations (at
    `rate`, flop/s) would take at least."""
    import triton

    from hf_cb.kernels.triton.rope_store import rope_store

    results = []
    for tokens, heads, kv_heads, dim, rotary_dim, norm in SHAPES:
        fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()
        q, k, v = fused.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
        cos, sin = (torch.rand(tokens, rotary_dim, device="cuda").bfloat16() for _ in range(2))
        blocks = 2 * tokens // PAGE + 1
        k_cache, v_cache = (torch.empty(blocks, PAGE, kv_heads, dim, device="cuda").bfloat16() for _ in range(2))
        slots = torch.randperm(blocks * PAGE, device="cuda")[:tokens]
        weight = torch.ones(dim, device="cuda").bfloat16() if norm else None
        seconds = 1e-3 * triton.testing.do_bench(
            lambda given=(q, k, v, cos, sin, k_cache, v_cache, slots), weight=weight: rope_store(
                *given, q_weight=weight, k_weight=weight
            ),
            return_mode="median",
        )
        cost = paper(tokens, heads, kv_heads, dim, rotary_dim, norm, 2)
        least = max(cost["bytes"] / bandwidth, cost["flops"] / rate)
        shape = dict(tokens=tokens, heads=heads, kv_heads=kv_heads, dim=dim, rotary_dim=rotary_dim, norm=norm)
        results.append(dict(kernel="rope_store", **shape, **cost, seconds=seconds, floor=least / seconds))
    return results


if __name__ == "__main__":
    for result in measure(*map(float, sys.argv[1:3])):
        print(json.dumps(result))
