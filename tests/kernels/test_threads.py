"""More threads than cores: they come late, take what others left, and sleep, and no result changes by a bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpu_variants import VARIANTS, needs_library, table_of, workspace
from packed_models import PROMPTS, alone, tokens
from test_paged_attention import Traffic
from tiny_models import greedy, make_model

import hf_cb
from hf_cb.kernels.cpu.linear import side_by_side

pytestmark = needs_library
BEST = VARIANTS[0]
MANY = (2, 7, 70)  # 70 are more than there are ranges of work


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", MANY)
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_product(threads: int, rows: int) -> None:
    table, (columns,) = table_of(BEST), side_by_side([3000], 64, torch.bfloat16)
    columns.pack(table, torch.randn(3000, 64).bfloat16(), threads)
    x = torch.randn(rows, 64).bfloat16()
    want = columns.linear(table, workspace(), x, 1)
    for _ in range(5):
        assert torch.equal(columns.linear(table, workspace(), x, threads), want)


@pytest.mark.parametrize("threads", MANY)
def test_attention(threads: int) -> None:
    traffic = Traffic([700, 90, 300, 5], num_heads=6, num_kv_heads=2)
    starts = [690, 80, 290, 0]
    traffic.step(table_of(BEST), [0, 0, 0, 0], traffic.lengths)
    want, _ = traffic.step(table_of(BEST), starts, traffic.lengths, threads=1)
    for _ in range(5):
        got, _ = traffic.step(table_of(BEST), starts, traffic.lengths, threads=threads)
        assert torch.equal(got, want)


@pytest.mark.parametrize("threads", MANY)
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])  # the second has norms at both ends of a layer
def test_whole_step(family: str, threads: int, threads_as_before: None) -> None:
    model = make_model(family)
    want = alone(model)
    torch.set_num_threads(threads)
    hf_cb.accelerate(model)
    assert tokens(model) == want
    assert [model.generate_batch([p], greedy(8))["req_0"].generated_tokens for p in PROMPTS] == want
