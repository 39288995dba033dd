"""StepPlan to flat tensors, and the reference backend against plain attention, old garbage in the cache included."""

from __future__ import annotations

import random

import pytest
import torch
from handmade import part, plain_attention

from hf_cb.attention.reference import ReferenceBackend
from hf_cb.engine.batch import build
from hf_cb.steps import LayerFacts, StepPlan

CPU = torch.device("cpu")


def test_a_mixed_step() -> None:
    plan = StepPlan(
        [
            part([5, 6, 7, 8, 9], 4, 1, [[3, 1, 2]], samples=1),  # decode
            part([10, 11, 12, 13, 14], 1, 3, [[4, 5]]),  # a chunk in the middle
            part([20, 21], 1, 1, [[6, 7]], samples=3, drafts=[30, 31]),
        ]
    )
    batch = build(plan, 1, 2)
    assert batch.input_ids.tolist() == [9, 11, 12, 13, 21, 30, 31]
    assert batch.position_ids.tolist() == [4, 1, 2, 3, 1, 2, 3]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, 7] and batch.seq_lens.tolist() == [5, 4, 4]
    assert batch.logits_rows.tolist() == [0, 4, 5, 6]
    group = batch.groups[0]
    assert group.slot_mapping.tolist() == [2 * 2, 4 * 2 + 1, 5 * 2, 5 * 2 + 1, 6 * 2 + 1, 7 * 2, 7 * 2 + 1]
    assert group.block_table.tolist() == [[3, 1, 2], [4, 5, 0], [6, 7, 0]]


def test_a_step_that_samples_nothing() -> None:
    batch = build(StepPlan([part([1, 2, 3], 0, 2, [[1]])]), 1, 2)
    assert batch.logits_rows.tolist() == []


@pytest.mark.parametrize("block_size", [1, 4, 32])
@pytest.mark.parametrize("heads", [(4, 4, 16, 16), (6, 2, 8, 24), (3, 1, 16, 16)])
@pytest.mark.parametrize("kind", [{}, {"window": 5}, {"chunk": 6}, {"softcap": 3.0}, {"sinks": True}])
def test_reference_backend(block_size: int, heads: tuple[int, int, int, int], kind: dict) -> None:
    kind = dict(kind)
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    sinks = torch.randn(heads[0], generator=generator) if kind.pop("sinks", False) else None
    layer = LayerFacts(*heads, scale=0.3, dtype=torch.float32, device=CPU, has_sinks=sinks is not None, **kind)
    backend = ReferenceBackend()
    lengths = [1, 2, 7, 8, 9, 31, 33, 64]
    free = list(range(1, 600))
    rng.shuffle(free)
    storage = backend.allocate(layer, 600, block_size)
    for cache in storage:
        cache.fill_(float("nan"))  # what others left there must not leak
        cache[0] = 0
    tables = [[free.pop() for _ in range(-(-n // block_size))] for n in lengths]
    backend.clear_blocks(storage, torch.tensor([b for t in tables for b in t]))
    k, v = (
        [torch.randn(n, layer.num_kv_heads, d, generator=generator) for n in lengths]
        for d in (layer.head_dim, layer.v_head_dim)
    )
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        turn = [(i, rng.choice([1, 1, 2, 5, 40])) for i in range(len(lengths)) if done[i] < lengths[i]]
        turn = [(i, min(c, lengths[i] - done[i])) for i, c in turn]
        plan = StepPlan([part([0] * lengths[i], done[i], c, [tables[i]]) for i, c in turn])
        batch = build(plan, 1, block_size)
        q = torch.randn(plan.num_tokens, layer.num_heads, layer.head_dim, generator=generator)
        new_k, new_v = (torch.cat([x[i][done[i] : done[i] + c] for i, c in turn]) for x in (k, v))
        meta = backend.prepare(batch, batch.groups[0], CPU)
        out = backend.attend(storage, layer, q, new_k, new_v, meta, sinks)
        at = 0
        for i, c in turn:
            end = done[i] + c
            want = plain_attention(layer, q[at : at + c], k[i][:end], v[i][:end], done[i], sinks)
            torch.testing.assert_close(out[at : at + c].double(), want, atol=2e-6, rtol=1e-5)
            done[i], at = end, at + c


def test_copying_blocks() -> None:
    layer = LayerFacts(2, 1, 4, 4, scale=1.0, dtype=torch.float32, device=CPU)
    backend = ReferenceBackend()
    storage = backend.allocate(layer, 4, 2)
    storage.k[1], storage.v[1] = 1.0, 2.0
    backend.copy_blocks(storage, torch.tensor([(1, 3)]))
    assert storage.k[3].eq(1).all() and storage.v[3].eq(2).all() and storage.k[2].eq(0).all()
