"""The gated MLP's middle: `act(gate) * up` of a fused projection, in one launch."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cb.kernels.device import on

ACTIVATIONS = ("silu", "gelu", "gelu_erf", "gelu_tanh", "relu", "relu2")


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Of float32."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":  # 1 + tanh(u) = 2 / (1 + e^-2u)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "gelu_erf":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "relu":
        return tl.where(x < 0.0, 0.0, x)
    else:
        tl.static_assert(KIND == "relu2")
        x = tl.where(x < 0.0, 0.0, x)
        return x * x


@triton.jit
def act_and_mul_kernel(
    gate_up, out, size, stride_token, stride_out_token, KIND: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (T * PARTS): each program a part of one token's row."""
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    row = gate_up + token * stride_token + cols
    gate, up = tl.load(row, mask=mask, other=0.0), tl.load(row + size, mask=mask, other=0.0)
    # rounded as the module's result is, which torch then multiplies
    activated = activate(gate.to(tl.float32), KIND).to(gate.dtype)
    result = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * stride_out_token + cols, result.to(out.dtype.element_ty), mask=mask)


@functools.cache  # a launch should not take longer than the kernel
def config_for(size: int, activation: str) -> dict[str, int | str]:
    """Constants and launch options for `size` columns of results, eight a thread."""
    block = min(triton.next_power_of_2(size), 1024)
    return dict(
        KIND="gelu_erf" if activation == "gelu" else activation,
        PARTS=triton.cdiv(size, block),
        BLOCK=block,
        num_warps=max(block // 256, 1),
        num_stages=1,
    )


def act_and_mul(gate_up: Tensor, *, activation: str = "silu", out: Tensor | None = None) -> Tensor:
    """`act(gate) * up` of gate_up `[T, 2 I]`, gates first: `[T, I]`.

    Computed in float32 and rounded where torch's modules round: the activation, then the product.

    Args:
        gate_up: float32, bfloat16 or float16; contiguous in the last dimension.
        activation: "silu", "gelu_erf" (or "gelu", torch's default), "gelu_tanh", "relu" or "relu2" (its square).
        out: where to write, of gate_up's dtype and contiguous in the last dimension.

    Raises:
        ValueError: an unknown activation; shapes, strides or dtypes that do not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown: it is one of {', '.join(ACTIVATIONS)}.")
    if gate_up.dim() != 2 or not gate_up.shape[1] or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(
            f"gate_up must be [T, 2 I] with a contiguous last dimension, not {tuple(gate_up.shape)} with strides "
            f"{gate_up.stride()}."
        )
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.shape != (tokens, size) or out.stride(1) != 1 or out.dtype != gate_up.dtype:
        raise ValueError(
            f"out must be {gate_up.dtype} {(tokens, size)} with a contiguous last dimension, not {out.dtype} "
            f"{tuple(out.shape)} with strides {out.stride()}."
        )
    if tokens:
        config = config_for(size, activation)
        with on(out.device):
            act_and_mul_kernel[(tokens * config["PARTS"],)](
                gate_up, out, size, gate_up.stride(0), out.stride(0), **config
            )
    return out
