"""Block tables on pools of a few blocks, with no model: growth, hits, forks, windows."""

from __future__ import annotations

import pytest

from hf_cb.core import Request, SamplingParams
from hf_cb.engine import kv_cache
from hf_cb.engine.kv_cache import KVCache
from hf_cb.models.groups import LayerGroup
from hf_cb.steps import NULL_BLOCK

FULL = LayerGroup(layers=(0,), storages=(0,))
SLIDING = LayerGroup(layers=(1,), storages=(0,), window=4)


def cache(num_blocks: int = 16, groups: tuple[LayerGroup, ...] = (FULL,), block_size: int = 2) -> KVCache:
    return KVCache(groups, num_blocks, block_size)


def request(tokens: list[int]) -> Request:
    return Request("r", tokens, SamplingParams(8))


def compute(kv: KVCache, r: Request, num_tokens: int) -> None:
    """As a step would: room, keys and values, publication."""
    assert kv.allocate(r, num_tokens) is not None
    since, r.num_computed = r.num_computed, r.num_computed + num_tokens
    kv.publish(r, since, r.num_computed)


def test_tables_grow_by_whole_blocks() -> None:
    kv, r = cache(), request(list(range(5)))
    compute(kv, r, 3)
    assert len(r.tables[0]) == 2
    compute(kv, r, 1)
    assert len(r.tables[0]) == 2
    compute(kv, r, 1)
    assert len(r.tables[0]) == 3
    kv.free(r)
    assert kv.pool.num_held == 0
    kv.pool.check_integrity()


def test_too_few_blocks_change_nothing() -> None:
    kv, r = cache(num_blocks=2), request(list(range(9)))
    compute(kv, r, 2)
    before = (list(r.tables[0]), kv.pool.num_available)
    assert kv.allocate(r, 5) is None
    assert (list(r.tables[0]), kv.pool.num_available) == before


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_hit_leaves_at_least_one_token_to_compute(length: int) -> None:
    kv, first = cache(), request([1, 2, 3, 4, 5])
    compute(kv, first, 5)
    kv.free(first)
    second = request([1, 2, 3, 4, 5][:length])
    assert kv.hit(second) == (length - 1) // 2 * 2


def test_a_hit_needs_the_whole_chain_from_the_start() -> None:
    kv, first = cache(), request([1, 2, 3, 4, 5])
    compute(kv, first, 5)
    assert kv.hit(request([9, 9, 3, 4, 5])) == 0
    assert kv.hit(request([1, 2, 9, 9, 5])) == 2


def test_a_hit_by_hash_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "hash_block", lambda before, tokens: b"always the same")
    kv, first = cache(), request([1, 2, 3])
    compute(kv, first, 3)
    assert kv.hit(request([7, 8, 9])) == 0
    assert kv.hit(request([1, 2, 9])) == 2


def test_blocks_of_a_finished_request_are_found_until_they_are_needed() -> None:
    kv, first = cache(num_blocks=3), request([1, 2, 3, 4, 5])
    compute(kv, first, 5)
    kv.free(first)
    other = request([7, 7, 7])
    compute(kv, other, 3)  # takes the free block, then evicts one: the end of the chain, not its beginning
    assert kv.hit(request([1, 2, 3, 4, 5])) == 2


def test_a_window_gives_blocks_back_and_needs_only_its_own_for_a_hit() -> None:
    kv, r = cache(groups=(FULL, SLIDING)), request(list(range(9)))
    compute(kv, r, 8)
    full, sliding = r.tables
    assert NULL_BLOCK not in full
    assert (
        list(sliding[:2]) == [NULL_BLOCK, NULL_BLOCK] and NULL_BLOCK not in sliding[2:]
    )  # keys 5 and later are still seen
    kv.free(r)
    kv.pool.check_integrity()
    again = request(list(range(9)))
    assert kv.hit(again) == 8
    assert list(again.tables[1][:2]) == [NULL_BLOCK, NULL_BLOCK]


def test_a_hit_is_as_long_as_the_sliding_layers_still_allow() -> None:
    kv, r = cache(groups=(FULL, SLIDING), num_blocks=12), request(list(range(9)))
    compute(kv, r, 8)
    kv.free(r)
    kv.pool.find((1, r.block_hashes[3]), [6, 7])
    lost = kv.pool._by_key[1, r.block_hashes[3]]
    kv.pool.share(lost)
    del kv.pool._by_key[1, kv.pool._content.pop(lost).key[1]]
    assert kv.hit(request(list(range(9)))) == 6


def test_a_fork_shares_the_partly_filled_block_and_whoever_writes_first_copies_it() -> None:
    kv, parent = cache(), request([1, 2, 3, 4, 5])
    compute(kv, parent, 5)
    child = request([1, 2, 3, 4, 5])
    child.num_computed = kv.fork(child, parent, 5)
    assert child.num_computed == 5 and child.tables == parent.tables
    parent.token_ids.append(6)
    shared = parent.tables[0][2]
    done = kv.allocate(parent, 1)
    assert done is not None and done.copies == [(0, shared, parent.tables[0][2])]
    assert child.tables[0][2] == shared and parent.tables[0][2] != shared
    child.token_ids.append(7)
    assert not kv.allocate(child, 1).copies, "the other one has moved away, so this one owns the block alone"


def test_a_fork_from_which_a_window_has_moved_on_shares_nothing() -> None:
    kv, parent = cache(groups=(SLIDING,)), request(list(range(12)))
    compute(kv, parent, 11)
    child = request(list(range(12)))
    assert kv.fork(child, parent, 4) == 0 and child.tables == []


def test_the_longest_request_really_fits() -> None:
    kv = cache(num_blocks=7, groups=(FULL, SLIDING))
    longest = kv.longest_request(step_tokens=3, at_most=100)
    assert kv.blocks_for(longest, 3) <= 7 < kv.blocks_for(longest + 1, 3)
    r = request(list(range(longest)))
    while r.pending:
        compute(kv, r, min(3, r.pending))


def test_nothing_that_builds_on_old_weights_is_found_again() -> None:
    """Also in layers that see only a window, whose newest block alone would make a hit."""
    kv, running = cache(groups=(SLIDING,)), request(list(range(12)))
    compute(kv, running, 6)
    kv.drop_cache()
    compute(kv, running, 5)
    assert kv.hit(request(list(range(12)))) == 0
    fresh = request(list(range(12)))
    kv.hit(fresh)
    compute(kv, fresh, 11)
    assert kv.hit(request(list(range(12)))) == 10
