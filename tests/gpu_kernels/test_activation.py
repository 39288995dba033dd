"""Gated activations against torch: float64 for the values, torch's own modules for the rounding."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from hf_cb.kernels.triton.activation import act_and_mul

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's: of e^-x, where infinity is right

REFERENCES = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("activation", REFERENCES)
@pytest.mark.parametrize("size", [1, 40, 1024, 2080])
def test_float32_is_exact_to_a_millionth(activation, size, device) -> None:
    torch.manual_seed(size)
    x = torch.randn(3, 2 * size, device=device) * 4
    gate, up = x.double().chunk(2, -1)
    want = REFERENCES[activation](gate) * up
    error = (act_and_mul(x, activation=activation).double() - want).abs()
    assert (error <= 1e-6 * want.abs() + 2e-6 * up.abs()).all()


@pytest.mark.parametrize("activation", REFERENCES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_twice_as_in_the_modules(activation, dtype, device) -> None:
    """The same but for a few that lie at the middle between two numbers. The interpreter cuts bfloat16 off instead of
    rounding it, so there two units are allowed."""
    torch.manual_seed(0)
    x = (torch.randn(4, 2 * 1040, device=device) * 3).to(dtype)
    gate, up = x.chunk(2, -1)
    want, got = REFERENCES[activation](gate) * up, act_and_mul(x, activation=activation)
    error, unit = (got.double() - want.double()).abs(), torch.finfo(dtype).eps
    assert (error <= 2.01 * unit * want.double().abs() + 1e-6 * up.double().abs()).all()
    if dtype == torch.float16 or device.type == "cuda":
        plain = gate > -2  # below, torch's own formula for gelu cancels in the last digits
        assert (got != want)[plain].double().mean() < 0.005


@pytest.mark.parametrize("activation", REFERENCES)
def test_extremes(activation, device) -> None:
    """Large numbers overflow nowhere on the way, and what is no number stays none."""
    gate = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 1e4, -1e4, float("nan")], device=device)
    got = act_and_mul(torch.stack([gate, torch.ones_like(gate)]).t().contiguous(), activation=activation)[:, 0]
    assert torch.allclose(got, REFERENCES[activation](gate), atol=1e-30, rtol=1e-6, equal_nan=True)


def test_rows_with_strides_and_into_a_given_place(device) -> None:
    wide = torch.randn(6, 100, device=device)
    x, out = wide[::2, 4:84], torch.zeros(3, 50, device=device)
    got = act_and_mul(x, out=out[:, 10:])
    assert torch.equal(got, act_and_mul(x.contiguous()))
    assert torch.equal(got, out[:, 10:])
    assert not out[:, :10].any()


def test_no_tokens_and_wrong_arguments(device) -> None:
    assert act_and_mul(torch.zeros(0, 8, device=device)).shape == (0, 4)
    x = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match="'swish' is unknown"):
        act_and_mul(x, activation="swish")
    with pytest.raises(ValueError, match=r"\[T, 2 I\]"):
        act_and_mul(x[:, :7])
    with pytest.raises(ValueError, match=r"\[T, 2 I\]"):
        act_and_mul(x.t())
    with pytest.raises(ValueError, match="out must be"):
        act_and_mul(x, out=torch.zeros(4, 8, device=device))


def test_the_benchmark_counts_the_bytes() -> None:
    """Two tokens of ten: gates and other halves are read, results written."""
    paper = runpy.run_path(str(Path(__file__).with_name("bench_activation.py")))["paper"]
    assert paper(2, 10, "relu", 2) == dict(bytes=(40 + 20) * 2, flops=40)
