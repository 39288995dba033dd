"""How near act_and_mul comes to the memory's bandwidth: `python bench_activation.py BYTES_PER_S FLOP_PER_S`."""

from __future__ import annotations

import json
import sys

import torch

# tokens, intermediate size, activation: Llama-3-8B, Gemma-2-9B, Nemotron's squared ReLU
SHAPES = [(64, 14336, "silu"), (8192, 14336, "silu"), (8192, 14336, "gelu_tanh"), (8192, 9216, "relu2")]
OPERATIONS = {"silu": 5, "gelu_tanh": 9, "gelu_erf": 6, "relu": 2, "relu2": 3}  # with the product; exp and erf are one


def paper(tokens: int, size: int, activation: str, itemsize: int) -> dict[str, int]:
    """Bytes that must move, and operations."""
    return dict(bytes=3 * tokens * size * itemsize, flops=OPERATIONS[activation] * tokens * size)


def measure(bandwidth: float, rate: float) -> list[dict]:
    """Times on the GPU. `floor` is the share of the time that the bytes (at `bandwidth`, bytes/s) or the operations (at
    `rate`, flop/s) would take at least."""
    import triton

    from hf_cb.kernels.triton.activation import act_and_mul

    results = []
    for tokens, size, activation in SHAPES:
        x = torch.randn(tokens, 2 * size, device="cuda").bfloat16()
        out = torch.empty(tokens, size, device="cuda").bfloat16()
        seconds = 1e-3 * triton.testing.do_bench(
            lambda x=x, activation=activation, out=out: act_and_mul(x, activation=activation, out=out),
            return_mode="median",
        )
        cost = paper(tokens, size, activation, 2)
        least = max(cost["bytes"] / bandwidth, cost["flops"] / rate)
        shape = dict(tokens=tokens, size=size, activation=activation)
        results.append(dict(kernel="act_and_mul", **shape, **cost, seconds=seconds, floor=least / seconds))
    return results


if __name__ == "__main__":
    for result in measure(*map(float, sys.argv[1:3])):
        print(json.dumps(result))
