"""The block tables of requests: one for each layer group, all fed from one pool.

Tables grow with `allocate`, full blocks become findable with `publish`, and blocks that no window reaches any more go
back at once. Sharing: a prefix hit shares full blocks, which are never written again; a fork shares the last, partly
filled block too, and whoever writes to a shared block first gets a copy (copy on write).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hf_cb.core import Request
from hf_cb.engine.block_pool import BlockPool
from hf_cb.engine.host_blocks import Saved
from hf_cb.models.groups import LayerGroup
from hf_cb.steps import NULL_BLOCK


class Allocation(NamedTuple):
    """What `allocate` did: blocks taken `(group, block)` and copies to make `(group, source, destination)`."""

    new_blocks: Sequence[tuple[int, int]]
    copies: Sequence[tuple[int, int, int]]


NOTHING = Allocation((), ())


class KVCache:
    """Tables, hashes and the pool. Knows no tensors."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        forks: bool = True,
    ) -> None:
        self.groups = list(groups)
        self._windows = [g for g, group in enumerate(groups) if group.window is not None or group.chunk is not None]
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.forks = forks
        self.pool = BlockPool(num_blocks)
        self.epoch = 0

    def drop_cache(self) -> None:
        """The weights have changed: nothing computed so far is found again, nor what is built upon it later."""
        self.pool.drop_cache()
        self.epoch += 1

    def blocks_for(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` holds at once, over all groups."""
        return sum(g.max_blocks(num_tokens, step_tokens, self.block_size) for g in self.groups)

    def longest_request(self, step_tokens: int, at_most: int) -> int:
        """The most tokens (up to `at_most`) that one request, alone, can have in the cache."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.blocks_for(middle, step_tokens) <= self.pool.num_blocks else (low, middle - 1)
            )
        return low

    # ------------------------------------------------------------------------------------------------------ prefix hits

    def cached_tokens(self, request: Request) -> int:
        """About how many of its tokens a waiting request would find: cheap, and a little too high where windows have
        left blocks behind."""
        if not self.prefix_caching:
            return 0
        most = self._begin_hash(request)
        length = 0
        while length < most and any(self.pool.has((g, request.block_hashes[length])) for g in range(len(self.groups))):
            length += 1
        return length * self.block_size

    def hit(self, request: Request) -> int:
        """Shares the longest known beginning of a request that holds nothing; returns its tokens.

        At least one token is left to compute, since its logits are wanted; all are where every token's are.
        """
        most = self._begin_hash(request)
        if not self.prefix_caching or request.scores_prompt:
            return 0
        found: list[dict[int, int | None]] = [{} for _ in self.groups]

        def known(group: int, i: int) -> bool:
            if i not in found[group]:
                key = (group, request.block_hashes[i])
                found[group][i] = self.pool.find(key, self._tokens(request, i))
            return found[group][i] is not None

        whole = [g for g, group in enumerate(self.groups) if group.oldest_needed(most * self.block_size) == 0]
        length = 0
        while length < most and all(known(g, length) for g in whole):
            length += 1
        rest = [g for g in range(len(self.groups)) if g not in whole]
        while length and not all(known(g, i) for g in rest for i in range(self._first_block(g, length), length)):
            length -= 1
        if length:
            request.tables = [
                array("i", [NULL_BLOCK if i < first else blocks[i] or NULL_BLOCK for i in range(length)])
                for blocks, first in zip(found, [self._first_block(g, length) for g in range(len(found))], strict=True)
            ]
            self._share(request.tables)
        return length * self.block_size

    def _first_block(self, group: int, length: int) -> int:
        """The first of `length` blocks that a query after them can see."""
        return self.groups[group].oldest_needed(length * self.block_size) // self.block_size

    def _share(self, tables: Sequence[Sequence[int]]) -> None:
        for table in tables:
            for block in table:
                if block != NULL_BLOCK:
                    self.pool.share(block)

    def fork(self, request: Request, source: Request, num_tokens: int) -> int:
        """Shares the first `num_tokens` tokens of `source`, partly filled last block included; returns how many."""
        if not self.forks or source.num_computed < num_tokens or not source.tables:
            return 0
        if (source.epoch, source.regime) != (self.epoch, request.regime):
            return 0  # its keys are others by now
        length = -(-num_tokens // self.block_size)
        tables = []
        for group, table in zip(self.groups, source.tables, strict=True):
            first = group.oldest_needed(num_tokens) // self.block_size
            if NULL_BLOCK in table[first:length]:
                return 0  # a window has moved on
            tables.append(array("i", [NULL_BLOCK]) * min(first, length) + table[first:length])
        self._share(tables)
        request.tables = tables
        request.epoch = source.epoch
        request.block_hashes = source.block_hashes[: num_tokens // self.block_size]
        return num_tokens

    # ----------------------------------------------------------------------------------------------- growing, shrinking

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        """Room for the request's next `num_tokens` tokens; None, and no change, if the pool has too few blocks."""
        if not request.tables:
            request.tables = [array("i") for _ in self.groups]
        first = request.num_computed // self.block_size
        length = -(-(request.num_computed + num_tokens) // self.block_size)
        references = self.pool.references
        for table in request.tables:
            if len(table) < length or references[table[first]] > 1:
                break
        else:
            return NOTHING  # in most steps: there is room in a block that nobody else has
        growth = [length - len(table) for table in request.tables]
        shared = [i for i, table in enumerate(request.tables) if first < len(table) and references[table[first]] > 1]
        if sum(g for g in growth if g > 0) + len(shared) > self.pool.num_available:
            return None
        new_blocks: list[tuple[int, int]] = []
        copies: list[tuple[int, int, int]] = []
        for i in shared:
            source, target = request.tables[i][first], self.pool.take()
            request.tables[i][first] = target
            self.pool.release([source])
            copies.append((i, source, target))
        for i, count in enumerate(growth):
            for _ in range(count):
                block = self.pool.take()
                request.tables[i].append(block)
                new_blocks.append((i, block))
        return Allocation(new_blocks, copies)

    def publish(self, request: Request, since: int, upto: int) -> None:
        """After a step that computed the tokens [since, upto): full blocks become findable, and blocks that no window
        reaches any more go back."""
        first, full = since // self.block_size, upto // self.block_size
        if self.prefix_caching and first < full:
            self._hash(request, full)
            for i in range(first, full):
                tokens = self._tokens(request, i)
                for group, table in enumerate(request.tables):
                    self.pool.publish(table[i], (group, request.block_hashes[i]), tokens)
        if self._windows:
            self._leave_window(request, upto)

    def load(self, request: Request, saved: Saved) -> list[tuple[int, int, int]] | None:
        """Blocks for what is saved of a request that holds nothing: copies to make, `(group, host block, block)`; None,
        and no change, if the pool has too few."""
        wanted = sum(host is not None for table in saved.tables for host in table)
        if wanted > self.pool.num_available:
            return None
        request.tables = [
            array("i", [NULL_BLOCK if host is None else self.pool.take() for host in table]) for table in saved.tables
        ]
        return [
            (group, host, block)
            for group, (table, hosts) in enumerate(zip(request.tables, saved.tables, strict=True))
            for block, host in zip(table, hosts, strict=True)
            if host is not None
        ]

    def free(self, request: Request) -> None:
        """Everything goes back; the ends of tables first, so that beginnings are evicted last."""
        for table in request.tables:
            self.pool.release(block for block in reversed(table) if block != NULL_BLOCK)
        request.tables = []

    def restart(self, request: Request, regime: Hashable) -> None:
        """Its keys are of another regime from now on: what it has goes back."""
        self.free(request)
        request.num_computed = 0
        request.block_hashes.clear()
        request.regime = regime

    def _leave_window(self, request: Request, position: int) -> None:
        for g in self._windows:
            group, table = self.groups[g], request.tables[g]
            i = group.oldest_needed(position) // self.block_size - 1
            while i >= 0 and i < len(table) and table[i] != NULL_BLOCK:
                self.pool.release([table[i]])
                table[i] = NULL_BLOCK
                i -= 1

    # ----------------------------------------------------------------------------------------------------------- hashes

    def _tokens(self, request: Request, i: int) -> list[int]:
        return request.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def _begin_hash(self, request: Request) -> int:
        """Hashes of all that a request may find in the cache, good for the present weights; how many blocks that is."""
        if request.epoch != self.epoch:
            request.epoch = self.epoch
            request.block_hashes.clear()
        most = (len(request.token_ids) - 1) // self.block_size
        if self.prefix_caching:
            self._hash(request, most)
        return most

    def _hash(self, request: Request, num_blocks: int) -> None:
        """Chained hashes of the request's first `num_blocks` blocks; the chain starts with what all keys depend on."""
        hashes = request.block_hashes
        while len(hashes) < num_blocks:
            before = hashes[-1] if hashes else repr((request.epoch, request.regime)).encode()
            hashes.append(hash_block(before, self._tokens(request, len(hashes))))


def hash_block(before: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a block that follows `before`, the hash of the block in front of it."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()
