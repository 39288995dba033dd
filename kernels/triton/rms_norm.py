"""RMSNorm (Zhang and Sennrich, 2019), with the residual addition before it in the same launch if there is one.

It rounds where transformers' modules do. Most of them (LlamaRMSNorm) normalise in float32, round to the input's dtype
and then multiply by the weight; others (Gemma's by 1 + weight, OLMo-2's, gpt-oss's) multiply in float32 and round once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cb.kernels.device import on

MOST_COLUMNS = 32768  # of a row: it stays in registers, 32 elements a thread


@triton.jit
def weighted(x, weight, offset, IN_FP32: tl.constexpr, dtype: tl.constexpr):
    """Normalised x of float32 times the weight, not yet rounded to `dtype`."""
    if not IN_FP32:
        x = x.to(dtype).to(tl.float32)
    return x * (weight.to(tl.float32) + offset)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    weight,
    residual,
    out,
    residual_out,
    rows,
    heads,
    eps,
    offset,
    stride_x_token,
    stride_x_head,
    stride_residual_token,
    stride_residual_head,
    stride_out_token,
    stride_out_head,
    stride_residual_out_token,
    stride_residual_out_head,
    SIZE: tl.constexpr,
    IN_FP32: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (cdiv(rows, ROWS)); row i is head i % heads of token i // heads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // heads).to(tl.int64)[:, None], (row % heads).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows)[:, None] & (cols < SIZE)
    values = tl.load(x + token * stride_x_token + head * stride_x_head + cols, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        weight = tl.load(weight + cols, mask=cols < SIZE, other=0.0)
    if residual is not None:
        at = residual + token * stride_residual_token + head * stride_residual_head + cols
        total = (values + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        at = residual_out + token * stride_residual_out_token + head * stride_residual_out_head + cols
        tl.store(at, total, mask=mask)
        values = total.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)[:, None]
    if weight is not None:
        values = weighted(values, weight, offset, IN_FP32, x.dtype.element_ty)
    at = out + token * stride_out_token + head * stride_out_head + cols
    tl.store(at, values.to(out.dtype.element_ty), mask=mask)


@functools.cache  # a launch should not take longer than the kernel
def config_for(size: int) -> dict[str, int]:
    """Constants and launch options for rows of this size. Short ones (heads) share a program, 2,048 elements in all;
    a thread gets 8 elements, and more only where there can be no more threads: 1,024, which are 16 warps of AMD's."""
    block = triton.next_power_of_2(size)
    rows = max(2048 // block, 1)
    most = 16 if block <= 16384 or torch.version.hip is not None else 32
    warps = min(max(rows * block // 256, 1), most)
    return dict(SIZE=size, ROWS=rows, BLOCK=block, num_warps=warps, num_stages=1)


def _layout(tensors: list[Tensor]) -> tuple[int, list[int]]:
    """Heads a token, and the strides of tokens and heads of tensors `[..., H, N]` of one shape: one head if that is as
    good, so that it is a constant for the compiler."""
    shape = tensors[0].shape
    if len(shape) == 2:
        return 1, [stride for x in tensors for stride in (x.stride(0), 0)]
    try:
        tensors = [x.view(-1, *shape[-2:]) if len(shape) > 2 else x.view(-1, 1, shape[-1]) for x in tensors]
    except RuntimeError as error:
        raise ValueError(f"The leading dimensions of {tuple(shape)} do not lie evenly: make it [T, H, N].") from error
    heads = tensors[0].shape[1]
    if all(x.shape[0] == 1 or x.stride(0) == heads * x.stride(1) for x in tensors):
        return 1, [stride for x in tensors for stride in (x.stride(1), 0)]
    return heads, [stride for x in tensors for stride in x.stride()[:2]]


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
    weight_in_fp32: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension of x `[..., N]`; the mean in float32.

    Args:
        x: float32, bfloat16 or float16, up to 32,768 columns, contiguous in the last dimension; `[T, H, N]` with any
            strides, for heads inside a fused projection.
        weight: `[N]`, contiguous, or None for none.
        residual: of x's shape and dtype; added first, and the sum is rounded to x's dtype, as a module would.
        offset: 1 for Gemma's weights, which are kept as the distance from 1.
        weight_in_fp32: False rounds the normalised row to x's dtype before it is multiplied (Llama), True multiplies
            in float32 and rounds once (Gemma).
        out, residual_out: where to write; may be x and the residual themselves.

    Returns:
        The normalised rows, in x's dtype unless `out` has another; with a residual also the sum.

    Raises:
        ValueError: shapes, strides or dtypes that do not fit.
    """
    size = x.shape[-1] if x.dim() else 0
    if not 0 < size <= MOST_COLUMNS:
        raise ValueError(f"x {tuple(x.shape)} must have 1 to {MOST_COLUMNS} columns: use torch's rms_norm for it.")
    if weight is not None and (weight.shape != (size,) or not weight.is_contiguous()):
        raise ValueError(f"weight must be [{size}] and contiguous, not {tuple(weight.shape)}.")
    if residual is None and residual_out is not None:
        raise ValueError("residual_out is where x + residual goes, and residual is None: give both or neither.")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if residual is not None and residual_out is None:
        residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    given = {"x": x, "out": out}
    if residual is not None and residual_out is not None:
        given |= {"residual": residual, "residual_out": residual_out}
    for name, tensor in given.items():
        if tensor.shape != x.shape or tensor.stride(-1) != 1 or (tensor.dtype != x.dtype and name != "out"):
            raise ValueError(
                f"{name} must be {x.dtype} {tuple(x.shape)} with a contiguous last dimension, not {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}."
            )
    heads, strides = _layout(list(given.values()))
    rows, config = x.numel() // size, config_for(size)
    if rows:
        x_strides, out_strides, residual_strides = strides[:2], strides[2:4], strides[4:] or [0] * 4
        with on(x.device):
            rms_norm_kernel[(-(-rows // config["ROWS"]),)](
                x,
                weight,
                residual,
                out,
                residual_out,
                rows,
                heads,
                eps,
                offset,
                *x_strides,
                *residual_strides[:2],
                *out_strides,
                *residual_strides[2:],
                IN_FP32=weight_in_fp32,
                **config,
            )
    return out if residual_out is None else (out, residual_out)
