"""Block tables as the cache keeps them and as a step has them, against the definition, in random traffic."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from fake_runner import FakeRunner, request, resolved

from hf_cb.core import Request
from hf_cb.engine.engine import Engine
from hf_cb.models.groups import LayerGroup
from hf_cb.steps import NULL_BLOCK, StepBatch

FULL = LayerGroup(layers=(0,), storages=(0,))
SLIDING = LayerGroup(layers=(1,), storages=(0,), window=6)
CHUNKED = LayerGroup(layers=(2,), storages=(0,), chunk=8)


class Checking(FakeRunner):
    """Compares each step with what its requests' tables say, number by number."""

    def __init__(self, groups: list[LayerGroup], block_size: int) -> None:
        super().__init__()
        self.groups = groups
        self.block_size = block_size
        self.seen: set[str] = set()

    def forward(self, batch: StepBatch) -> torch.Tensor:
        kinds = [count > 1 for count in batch.query_lens_list]
        self.seen |= {"mixed" if any(kinds) else "decodes"}
        for g, (group, given) in enumerate(zip(self.groups, batch.groups, strict=True)):
            tables = [r.tables[g] for r in batch.requests]
            assert all(isinstance(table, array) and table.typecode == "i" for table in tables)
            width = max(map(len, tables))
            padded = [[*table, *[NULL_BLOCK] * (width - len(table))] for table in tables]
            assert given.block_table.dtype == torch.int32 and given.block_table.tolist() == padded
            self.seen |= {"padded"} if len({len(table) for table in tables}) > 1 else set()
            slots = []
            for r, count, length in zip(batch.requests, batch.query_lens_list, batch.seq_lens_list, strict=True):
                for position in range(length - count, length):
                    block = r.tables[g][position // self.block_size]
                    assert block != NULL_BLOCK, "a token is written to a block of its request's"
                    slots.append(block * self.block_size + position % self.block_size)
                self._check_seen(group, r.tables[g], length - count, length)
            assert given.slot_mapping.dtype == torch.int64 and given.slot_mapping.tolist() == slots
        return super().forward(batch)

    def _check_seen(self, group: LayerGroup, table: array[int], start: int, length: int) -> None:
        oldest = group.oldest_needed(start) // self.block_size
        assert NULL_BLOCK not in table[oldest : -(-length // self.block_size)], "what a query sees is there"
        self.seen |= {"left behind"} if NULL_BLOCK in table else set()


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("groups", [[FULL], [FULL, SLIDING, CHUNKED]])
def test_a_step_has_the_tables_of_its_requests(groups: list[LayerGroup], overlap: bool, block_size: int) -> None:
    rng = random.Random(block_size)
    blocks = len(groups) * 50 // block_size
    options = {"block_size": block_size, "num_blocks": blocks, "max_batch_tokens": 24, "prefill_chunk": 9}
    runner = Checking(groups, block_size)
    engine = Engine(runner, resolved(**options, overlap=overlap))
    engine.recovers = False
    shared, coming = [rng.randrange(50) for _ in range(9)], []
    for i in range(40):
        prompt = (shared if rng.random() < 0.5 else []) + [rng.randrange(50) for _ in range(rng.randint(1, 12))]
        coming.append(request(f"r{i}", prompt, rng.randint(1, 12)))
        if rng.random() < 0.3:
            coming.append(request(f"fork{i}", prompt, 6, fork_of=coming[-1]))
    ended: list[Request] = []
    while coming or engine.has_work:
        for _ in range(min(len(coming), rng.choice([0, 1, 4]) if engine.has_work else 1)):
            engine.admit(coming.pop(0))
        ended += [update.request for update in engine.step() if update.finished]
    engine.check_idle()
    assert all(r.tables == [] for r in ended)
    assert {"mixed", "decodes", "padded"} <= runner.seen and ("left behind" in runner.seen) == (len(groups) > 1)
    assert engine.scheduler.preemptions and engine.kv.pool.num_cached
