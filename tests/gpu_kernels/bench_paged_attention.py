"""How near paged attention comes to the memory's bandwidth or the tensor cores' rate:
`python bench_paged_attention.py BYTES_PER_S FLOP_PER_S`."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import torch

PAGE = 16


class Case(NamedTuple):
    """A step of requests with `lengths` keys, whose last `counts` tokens are new. The heads are Llama-3-8B's."""

    name: str
    lengths: list[int]
    counts: list[int]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kv_dtype: torch.dtype = torch.bfloat16


CASES = [
    Case("decode", [8192] * 32, [1] * 32),
    Case("decode, e4m3", [8192] * 32, [1] * 32, kv_dtype=torch.float8_e4m3fn),
    Case("decode, no groups", [4096] * 32, [1] * 32, 32, 32),
    Case("decode, one", [8192], [1]),
    Case("decode, many", [2048] * 256, [1] * 256),
    Case("decode, unlike", [65536] + [1024] * 31, [1] * 32),
    Case("decode, gpt-oss, full", [8192] * 32, [1] * 32, 64, 8, 64, sinks=True),
    Case("decode, gpt-oss, window", [8192] * 32, [1] * 32, 64, 8, 64, 128, sinks=True),
    Case("decode, gemma-2", [4096] * 32, [1] * 32, 16, 8, 256, softcap=50.0),
    Case("speculated", [8192] * 32, [5] * 32),
    Case("prompts", [4096] * 4, [4096] * 4),
    Case("chunk", [32768], [4096]),
    Case("short chunk", [32768], [128]),
    Case("mixed", [4096] * 31 + [8192], [1] * 31 + [2048]),
    Case("prompts, gemma-2", [4096] * 4, [4096] * 4, 16, 8, 256, softcap=50.0),
]


def paper(case: Case) -> dict[str, int]:
    """Bytes that must move (keys and values that are seen, once; q, out) and operations (of pairs that are seen)."""
    window = case.window or max(case.lengths)
    keys = pairs = 0
    for length, count in zip(case.lengths, case.counts, strict=True):
        keys += min(length, window + count - 1)
        pairs += sum(min(position + 1, window) for position in range(length - count, length))
    cached = 2 * keys * case.kv_heads * case.dim * case.kv_dtype.itemsize
    return dict(
        bytes=cached + 2 * sum(case.counts) * case.heads * case.dim * 2, flops=4 * pairs * case.heads * case.dim
    )


def arguments(case: Case, device: str) -> dict[str, Any]:
    """Random blocks, as after some traffic."""
    needed = [-(-n // PAGE) for n in case.lengths]
    blocks = torch.randperm(sum(needed)).int().split(needed)
    shape = (sum(needed), PAGE, case.kv_heads, case.dim)
    k_cache, v_cache = (torch.randn(shape, device=device, dtype=torch.bfloat16).to(case.kv_dtype) for _ in range(2))
    scale = torch.ones(1, device=device) if case.kv_dtype != torch.bfloat16 else None
    tables = dict(
        block_table=torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True).to(device),
        cu_seqlens_q=torch.tensor([0, *case.counts]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(case.lengths, dtype=torch.int32, device=device),
    )
    q = torch.randn(sum(case.counts), case.heads, case.dim, device=device, dtype=torch.bfloat16)
    sinks = torch.zeros(case.heads, device=device) if case.sinks else None
    options = dict(window=case.window, softcap=case.softcap, sinks=sinks, k_scale=scale, v_scale=scale)
    sizes = dict(max_seqlen_q=max(case.counts), scale=case.dim**-0.5, out=torch.empty_like(q))
    return dict(q=q, k_cache=k_cache, v_cache=v_cache) | tables | sizes | options


def measure(bandwidth: float, rate: float) -> list[dict]:
    """Times of replayed graphs. `floor` is the share of the time that the bytes (at `bandwidth`, bytes/s) or the
    operations (at `rate`, flop/s) would take at least."""
    import triton

    from hf_cb.kernels.triton.paged_attention import paged_attention

    results = []
    for case in CASES:
        given = arguments(case, "cuda")
        seconds = 1e-3 * triton.testing.do_bench_cudagraph(lambda given=given: paged_attention(**given))
        cost = paper(case)
        least = max(cost["bytes"] / bandwidth, cost["flops"] / rate)
        results.append(dict(kernel="paged_attention", case=case.name, **cost, seconds=seconds, floor=least / seconds))
    return results


if __name__ == "__main__":
    for result in measure(*map(float, sys.argv[1:3])):
        print(json.dumps(result))
