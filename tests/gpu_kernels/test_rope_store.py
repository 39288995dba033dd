"""Rotary embedding and store in one: against transformers' own functions, rounding included, and against float64."""

from __future__ import annotations

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as turn_neighbours
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn_halves

pytest.importorskip("triton")

from hf_cb.kernels.triton.rope_store import rope_store

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAGE, BLOCKS = 4, 4


@dataclass
class Step:
    """Some tokens' fused projection, their angles and slots, and a cache that shows where it was written."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    tokens: int = 5
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    v_dim: int = 64
    rotary_dim: int = 64
    interleaved: bool = False
    cache_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        sizes = (self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.v_dim)
        self.fused = torch.randn(self.tokens, sum(sizes) + 8, device=self.device).to(self.dtype)
        self.q, self.k, self.v = (
            part.view(self.tokens, part.shape[1] // dim, dim)
            for part, dim in zip(self.fused[:, 8:].split(sizes, 1), (self.dim, self.dim, self.v_dim), strict=True)
        )
        angles = torch.rand(self.tokens, self.rotary_dim // 2, device=self.device) * 6
        self.cos, self.sin = (f(torch.cat([angles, angles], -1)).to(self.dtype) for f in (torch.cos, torch.sin))
        self.slots = torch.tensor([9, 3, -1, 4, 15, 6, 0], device=self.device)[: self.tokens]
        shape, dtype = (BLOCKS, PAGE, self.kv_heads), self.cache_dtype or self.dtype
        self.k_cache = torch.full((*shape, self.dim), 7.0, device=self.device).to(dtype)
        self.v_cache = torch.full((*shape, self.v_dim), 8.0, device=self.device).to(dtype)

    def run(self, **more: Any) -> Tensor:
        factors = (more.pop("cos", self.cos), more.pop("sin", self.sin))
        options = dict(interleaved=self.interleaved, **self.options) | more
        return rope_store(self.q, self.k, self.v, *factors, self.k_cache, self.v_cache, self.slots, **options)

    def turned(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x as transformers rotates it, in x's own dtype or in this one."""
        turn = turn_neighbours if self.interleaved else turn_halves
        x = x.to(dtype or x.dtype)
        part = x[None, ..., : self.rotary_dim]
        part = turn(part, part, self.cos[None].to(x.dtype), self.sin[None].to(x.dtype), unsqueeze_dim=2)[0][0]
        return torch.cat([part, x[..., self.rotary_dim :]], -1)

    def check_cache(self, cache: Tensor, want: Tensor, start: float, limit: float) -> None:
        """These rows in their slots to within `limit`, and nothing else written."""
        used = [slot for slot in self.slots.tolist() if slot >= 0]
        rows = cache.double().reshape(-1, *cache.shape[2:])
        stored = want[self.slots >= 0].double()
        assert (rows[used] - stored).abs().max() <= limit
        assert (rows[[i for i in range(len(rows)) if i not in used]] == start).all()


SHAPES = [
    dict(dim=64, rotary_dim=64),
    dict(dim=80, rotary_dim=32, v_dim=40),
    dict(dim=96, rotary_dim=96, kv_heads=1),
    dict(dim=24, rotary_dim=12, heads=7, kv_heads=7),
    dict(dim=256, rotary_dim=256, heads=5, tokens=3),
    dict(dim=128, rotary_dim=64, heads=9, kv_heads=9, tokens=1),
    dict(dim=2, rotary_dim=2, v_dim=2, heads=1, kv_heads=1),
]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_is_exact_to_a_millionth(shape, interleaved, device) -> None:
    step = Step(device, interleaved=interleaved, **shape)
    before = step.fused.clone()
    want_q, want_k = step.turned(step.q, torch.float64), step.turned(step.k, torch.float64)
    out = step.run()
    assert out is step.q
    assert (out.double() - want_q).abs().max() <= 1e-6
    step.check_cache(step.k_cache, want_k, 7, 1e-6)
    step.check_cache(step.v_cache, step.v, 8, 0)
    queries = slice(8, 8 + step.heads * step.dim)
    before[:, queries] = step.fused[:, queries]
    assert torch.equal(step.fused, before), "nothing but the queries may change in the projection"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_half_precision_is_rounded_as_the_modules_round_it(shape, interleaved, dtype, device) -> None:
    """Bit for bit. The interpreter cuts bfloat16 off instead of rounding it, so there it may be three units off."""
    step = Step(device, dtype=dtype, interleaved=interleaved, **shape)
    want_q, want_k = step.turned(step.q), step.turned(step.k)
    limit = 3 * 2.0**-7 * 4 if dtype == torch.bfloat16 and device.type == "cpu" else 0
    out = step.run(q_out=torch.empty_like(step.q))
    assert (out.double() - want_q.double()).abs().max() <= limit
    step.check_cache(step.k_cache, want_k, 7, limit)
    step.check_cache(step.v_cache, step.v, 8, 0)


def test_float32_factors_round_once(device) -> None:
    step = Step(device, dtype=torch.float16)
    cos, sin = (factor.float() * 1.0001 for factor in (step.cos, step.sin))
    a, b = step.q.float().chunk(2, -1)
    c, s = cos[:, None, :32], sin[:, None, :32]
    want = torch.cat([a * c - b * s, b * c + a * s], -1).half()
    assert (step.run(cos=cos, sin=sin) != want).double().mean() < 1e-3  # a fused multiply-add may round otherwise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_heads_are_normalised_first(shape, interleaved, dtype, device) -> None:
    step = Step(device, dtype=dtype, interleaved=interleaved, **shape)
    norms = [LlamaRMSNorm(step.dim, 1e-6).to(device=device, dtype=dtype) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        want_q, want_k = step.turned(norms[0](step.q)), step.turned(norms[1](step.k))
    out = step.run(q_weight=norms[0].weight.detach(), k_weight=norms[1].weight.detach(), eps=1e-6)
    limit = {torch.float32: 2e-5, torch.bfloat16: 0.2, torch.float16: 0.02}[dtype]
    assert (out.double() - want_q.double()).abs().max() <= limit
    if dtype == torch.float16 or (dtype == torch.bfloat16 and device.type == "cuda"):
        assert (out != want_q).double().mean() < 0.01
    step.check_cache(step.k_cache, want_k, 7, limit)


def test_weights_as_a_distance_from_one_are_multiplied_in_float32(device) -> None:
    step = Step(device, dtype=torch.float16)
    weight = torch.randn(64, device=device).half()
    x = step.q.float()
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())
    want = step.turned(normalised.half())
    got = step.run(q_weight=weight, k_weight=weight, offset=1.0, weight_in_fp32=True)
    assert (got != want).double().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_fp8_cache_gets_what_store_kv_would_write(dtype, device) -> None:
    from hf_cb.kernels.triton.kv_store import store_kv

    step = Step(device, dtype=dtype, cache_dtype=torch.float8_e4m3fn, dim=80, rotary_dim=32)
    k_scale, v_scale = torch.tensor([0.5, 0.01], device=device), torch.tensor([0.3], device=device)
    want = step.k_cache.clone(), step.v_cache.clone()
    plain = Step(device, dtype=dtype, dim=80, rotary_dim=32)
    plain.slots = torch.arange(step.tokens, device=device)
    plain.run()
    rotated = plain.k_cache.view(-1, step.kv_heads, 80)[: step.tokens]
    store_kv(rotated, step.v, *want, step.slots, k_scale=k_scale, v_scale=v_scale)
    step.run(k_scale=k_scale, v_scale=v_scale)
    assert torch.equal(step.k_cache.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(step.v_cache.view(torch.uint8), want[1].view(torch.uint8))


def test_other_forms_of_the_factors(device) -> None:
    """Half of them; each number twice; int32 slots."""
    want = Step(device, interleaved=True).run()
    half = Step(device, interleaved=True)
    assert torch.equal(half.run(cos=half.cos[:, :32], sin=half.sin[:, :32], rotary_dim=64), want)
    twice = Step(device, interleaved=True)
    cos, sin = (x[:, :32].repeat_interleave(2, -1) for x in (twice.cos, twice.sin))
    twice.slots = twice.slots.int()
    assert torch.equal(twice.run(cos=cos[:, ::2], sin=sin[:, ::2], rotary_dim=64), want)
    twice.check_cache(twice.k_cache, twice.turned(twice.k, torch.float64), 7, 1e-6)


def test_no_tokens_and_wrong_arguments(device) -> None:
    assert Step(device, tokens=0).run().shape[0] == 0
    step = Step(device)
    with pytest.raises(ValueError, match="between 2 and the head's 64"):
        step.run(rotary_dim=66)
    with pytest.raises(ValueError, match="gather a row"):
        step.run(cos=step.cos[:2])
    with pytest.raises(ValueError, match="both None"):
        step.run(q_weight=torch.ones(64, device=device))
    with pytest.raises(ValueError, match="q_out must be"):
        step.run(q_out=step.q.half())


def test_the_benchmark_counts_the_bytes() -> None:
    """Two tokens of three query heads and one KV head of 8, of which 4 turn: read and written, cosines and sines of two
    pairs, and two slots."""
    paper = runpy.run_path(str(Path(__file__).with_name("bench_rope_store.py")))["paper"]
    assert paper(2, 3, 1, 8, 4, False, 2) == dict(bytes=2 * (24 + 24 + 16 * 4 + 8) + 16, flops=6 * 2 * 4 * 2)
    assert paper(2, 3, 1, 8, 4, True, 2) == dict(bytes=2 * (48 + 48 + 16 * 4 + 8) + 16, flops=96 + 4 * 64)
