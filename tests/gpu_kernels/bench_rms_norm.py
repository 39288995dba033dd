"""How near rms_norm comes to the memory's bandwidth: `python bench_rms_norm.py BYTES_PER_S FLOP_PER_S`."""

from __future__ import annotations

import json
import sys

import torch

# rows, columns, with a residual: hidden states of decodes and prompt chunks, and heads
SHAPES = [
    (64, 4096, True),
    (256, 8192, True),
    (8192, 4096, True),
    (8192, 4096, False),
    (8192, 16384, True),
    (64 * 40, 128, False),
    (8192 * 40, 128, False),
]


def paper(rows: int, size: int, residual: bool, itemsize: int) -> dict[str, int]:
    """Bytes that must move (x, the residual and both results, the weight once) and operations: square, add, scale and
    weigh each element, and add the residual."""
    tensors = 4 if residual else 2
    return dict(bytes=(tensors * rows + 1) * size * itemsize, flops=(5 if residual else 4) * rows * size)


def measure(bandwidth: float, rate: float) -> list[dict]:
    """Times on the GPU. `floor` is the share of the time that the bytes (at `bandwidth`, bytes/s) or the operations (at
    `rate`, flop/s) would take at least."""
    import triton

    from hf_cb.kernels.triton.rms_norm import rms_norm

    results = []
    for rows, size, residual in SHAPES:
        x, other = (torch.randn(rows, size, device="cuda").bfloat16() for _ in range(2))
        weight, out = torch.ones(size, device="cuda").bfloat16(), torch.empty_like(x)
        more = dict(residual=other, residual_out=torch.empty_like(x)) if residual else {}
        seconds = 1e-3 * triton.testing.do_bench(
            lambda x=x, weight=weight, out=out, more=more: rms_norm(x, weight, 1e-6, out=out, **more),
            return_mode="median",
        )
        cost = paper(rows, size, residual, 2)
        least = max(cost["bytes"] / bandwidth, cost["flops"] / rate)
        shape = dict(rows=rows, size=size, residual=residual)
        results.append(dict(kernel="rms_norm", **shape, **cost, seconds=seconds, floor=least / seconds))
    return results


if __name__ == "__main__":
    for result in measure(*map(float, sys.argv[1:3])):
        print(json.dumps(result))
