"""The pool on a few blocks, with no model: counts, eviction order, content that is found and content that is not."""

from __future__ import annotations

import pytest

from hf_cb.engine.block_pool import BlockPool


def fill(pool: BlockPool, name: str) -> int:
    """Takes a block, publishes content under that name, gives it back: now it is cached."""
    block = pool.take()
    pool.publish(block, (0, name.encode()), [ord(c) for c in name])
    pool.release([block])
    return block


def found(pool: BlockPool, name: str) -> int | None:
    return pool.find((0, name.encode()), [ord(c) for c in name])


def test_free_cached_and_held_always_add_up() -> None:
    pool = BlockPool(4)
    held = pool.take()
    fill(pool, "a")
    assert (pool.num_held, pool.num_cached, pool.num_available) == (1, 1, 3)
    pool.release([held])
    assert (pool.num_held, pool.num_cached, pool.num_available) == (0, 1, 4)
    pool.check_integrity()


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(3)
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]


def test_free_blocks_go_first_the_last_freed_one_before_untouched_ones() -> None:
    pool = BlockPool(3)
    used = pool.take()
    pool.release([used])
    assert pool.take() == used


def test_eviction_takes_the_longest_unused_content_one_block_at_a_time() -> None:
    pool = BlockPool(3)
    a, b, c = (fill(pool, name) for name in "abc")
    pool.share(a)
    pool.release([a])  # a was used again, so b is the oldest now
    assert pool.take() == b
    assert found(pool, "b") is None and found(pool, "a") == a and found(pool, "c") == c
    pool.check_integrity()


def test_a_shared_cached_block_cannot_be_evicted() -> None:
    pool = BlockPool(2)
    a, b = fill(pool, "a"), fill(pool, "b")
    pool.share(a)
    assert pool.take() == b and pool.num_available == 0
    assert pool.references[a] == 1


def test_equal_hash_and_other_tokens_is_no_hit() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.publish(block, (0, b"collision"), [1, 2])
    assert pool.find((0, b"collision"), [1, 3]) is None
    assert pool.find((1, b"collision"), [1, 2]) is None, "another layer group's block holds other keys"
    assert pool.find((0, b"collision"), [1, 2]) == block


def test_content_that_is_known_stays_with_its_older_block() -> None:
    pool = BlockPool(2)
    older, newer = pool.take(), pool.take()
    for block in (older, newer):
        pool.publish(block, (0, b"same"), [1])
    pool.release([newer, older])
    assert pool.find((0, b"same"), [1]) == older and pool.num_cached == 1
    pool.check_integrity()


def test_dropping_the_cache_forgets_the_content_of_held_blocks_too() -> None:
    pool = BlockPool(2)
    fill(pool, "a")
    held = pool.take()
    pool.publish(held, (0, b"h"), [1])
    pool.drop_cache()
    assert pool.num_cached == 0 and pool.find((0, b"h"), [1]) is None
    pool.release([held])
    assert pool.num_available == 2 and pool.num_cached == 0
    pool.check_integrity()


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.release([block])
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([block])
