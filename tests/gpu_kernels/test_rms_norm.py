"""RMSNorm against float64 and against transformers' own modules, rounding included."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton")

from hf_cb.kernels.triton.rms_norm import rms_norm

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def exact(x: Tensor, weight: Tensor | None, offset: float = 0.0) -> Tensor:
    x = x.double()
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return x if weight is None else x * (weight.double() + offset)


def check(got: Tensor, want: Tensor, ulps: float) -> None:
    assert ((got.double() - want).abs() <= ulps * ULP[got.dtype] * want.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (5, 48), (37, 64), (20, 96), (3, 300), (2, 2560), (2, 16384), (1, 18432)]
)
def test_rows_of_any_length(rows, size, dtype, device) -> None:
    torch.manual_seed(size)
    x = (torch.randn(rows, size, device=device) * 3).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    check(rms_norm(x, weight, EPS), exact(x, weight), 2 if dtype != torch.float32 else 8)
    check(
        rms_norm(x, weight, EPS, offset=1.0, weight_in_fp32=True),
        exact(x, weight, 1.0),
        1 if dtype != torch.float32 else 8,
    )
    check(rms_norm(x, None, EPS), exact(x, None), 1 if dtype != torch.float32 else 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_it_rounds_where_the_modules_round(family, dtype, device) -> None:
    """The interpreter cuts bfloat16 off instead of rounding it, so there one unit is allowed; elsewhere all but a few
    are the same, which differ where the sums of squares were added in another order."""
    torch.manual_seed(0)
    module = (LlamaRMSNorm if family == "llama" else GemmaRMSNorm)(320, eps=EPS).to(device=device, dtype=dtype)
    torch.nn.init.normal_(module.weight)
    x = (torch.randn(40, 320, device=device) * 2).to(dtype)
    gemma = family == "gemma"
    got = rms_norm(x, module.weight.detach(), EPS, offset=float(gemma), weight_in_fp32=gemma)
    want = module(x).detach()
    check(got, want.double(), 2.01 if dtype != torch.float32 else 4)
    if dtype == torch.float16 or (dtype == torch.bfloat16 and device.type == "cuda"):
        assert (got != want).double().mean() < 0.003


def test_the_two_orders_differ(device) -> None:
    """So that the test before can fail."""
    x, weight = torch.randn(40, 320, device=device).half(), torch.randn(320, device=device).half()
    once, twice = (rms_norm(x, weight, EPS, weight_in_fp32=order) for order in (True, False))
    assert (once != twice).double().mean() > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_added_and_rounded_first(dtype, device) -> None:
    torch.manual_seed(1)
    x, residual = (torch.randn(6, 200, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(200, device=device).to(dtype)
    y, total = rms_norm(x, weight, EPS, residual=residual)
    check(total, x.double() + residual.double(), 0.51 if dtype != torch.bfloat16 or device.type == "cuda" else 1)
    assert torch.equal(y, rms_norm(total, weight, EPS))
    in_place = x.clone(), residual.clone()
    a, b = rms_norm(in_place[0], weight, EPS, residual=in_place[1], out=in_place[0], residual_out=in_place[1])
    assert a is in_place[0] and b is in_place[1]
    assert torch.equal(a, y) and torch.equal(b, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_inside_a_fused_projection(dtype, device) -> None:
    """q_norm on a view, in place: nothing else of the projection changes."""
    torch.manual_seed(2)
    qkv = torch.randn(7, 3 * 48 + 40, device=device).to(dtype)
    before, weight = qkv.clone(), torch.randn(48, device=device).to(dtype)
    q = qkv[:, 16 : 16 + 96].view(7, 2, 48)
    want = rms_norm(q.contiguous(), weight, EPS)
    check(want, exact(q, weight), 2 if dtype != torch.float32 else 8)
    out = torch.full((9, 4, 60), 5.0, device=device).to(dtype)
    rms_norm(q, weight, EPS, out=out[1:8, 1:3, 4:52])
    assert torch.equal(out[1:8, 1:3, 4:52], want)
    assert (out == 5).sum() >= out.numel() - want.numel()
    assert rms_norm(q, weight, EPS, out=q) is q
    assert torch.equal(q, want)
    assert torch.equal(qkv[:, :16], before[:, :16]) and torch.equal(qkv[:, 112:], before[:, 112:])


@pytest.mark.parametrize("shape", [(33,), (1, 5, 33), (2, 5, 33), (1, 4, 3, 33), (2, 4, 3, 33), (0, 33)])
def test_any_leading_dimensions(shape, device) -> None:
    x = torch.randn(shape, device=device)
    got = rms_norm(x, None, EPS)
    assert got.shape == x.shape
    check(got, exact(x, None), 8)


def test_rows_of_zeros_and_large_numbers(device) -> None:
    assert not rms_norm(torch.zeros(2, 40, device=device), None, EPS).any()
    x = torch.full((2, 40), 60000.0, device=device).half()
    assert (rms_norm(x, None, EPS) == 1).all()


def test_wrong_arguments(device) -> None:
    x, weight = torch.zeros(4, 32, device=device), torch.zeros(32, device=device)
    with pytest.raises(ValueError, match="columns"):
        rms_norm(torch.zeros(1, 40000, device=device), None, EPS)
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(x, weight[:16], EPS)
    with pytest.raises(ValueError, match="contiguous last"):
        rms_norm(torch.zeros(32, 4, device=device).t(), weight, EPS)
    with pytest.raises(ValueError, match="residual must be"):
        rms_norm(x, weight, EPS, residual=x.half())
    with pytest.raises(ValueError, match="both or neither"):
        rms_norm(x, weight, EPS, residual_out=x)
    with pytest.raises(ValueError, match="evenly"):
        rms_norm(torch.zeros(2, 4, 3, 64, device=device)[:, :3, :, :32], None, EPS)


def test_the_benchmark_counts_the_bytes() -> None:
    """Three rows of ten: read and written, with the residual twice, and the weight."""
    paper = runpy.run_path(str(Path(__file__).with_name("bench_rms_norm.py")))["paper"]
    assert paper(3, 10, False, 2) == dict(bytes=(30 + 30 + 10) * 2, flops=120)
    assert paper(3, 10, True, 4) == dict(bytes=(60 + 60 + 10) * 4, flops=150)
