"""Where KV lives: block ids with reference counts, and the blocks that a later request may find again by content.

A block is held (references > 0), cached (no references, but content that a prefix hit can use), or free. Taking a block
uses a free one first, the last one freed first, so that memory already touched is touched again; then it evicts the
cached block that has gone longest without use, one at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Key = tuple[int, bytes]  # (layer group, chained hash of all tokens up to the block's end)


class _Content(NamedTuple):
    key: Key
    tokens: tuple[int, ...]


class BlockPool:
    """Blocks 1 to `num_blocks`; 0 is the null block and belongs to nobody."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = [0] * (num_blocks + 1)  # by block; for others to read
        self._free = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._content: dict[int, _Content] = {}
        self._by_key: dict[Key, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def take(self) -> int:
        """A block with one reference. The caller has checked `num_available`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference; a cached block comes back to life."""
        if self.references[block] == 0:
            del self._cached[block]
        self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less for each, in the order in which they may be evicted later."""
        for block in blocks:
            if self.references[block] <= 0:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self._content:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, key: Key, tokens: Sequence[int]) -> None:
        """Makes a full block findable. If its content is known already, the older block stays the one that is found."""
        if key not in self._by_key and block not in self._content:
            self._by_key[key] = block
            self._content[block] = _Content(key, tuple(tokens))

    def find(self, key: Key, tokens: Sequence[int]) -> int | None:
        """The block with this content. Tokens are compared too: equal hashes alone prove nothing."""
        block = self._by_key.get(key)
        if block is None or self._content[block].tokens != tuple(tokens):
            return None
        return block

    def has(self, key: Key) -> bool:
        """Whether some block is known by this key; `find` says whether it is the right one."""
        return key in self._by_key

    def drop_cache(self) -> None:
        """Forgets all content, of held blocks too: the weights have changed."""
        self._content.clear()
        self._by_key.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        content = self._content.pop(block)
        del self._by_key[content.key]

    def check_integrity(self) -> None:
        """Raises AssertionError if the books do not balance; for tests and for an idle engine."""
        free, cached = set(self._free), set(self._cached)
        held = {b for b in range(1, self.num_blocks + 1) if self.references[b] > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & held or cached & held), "a block is in two states"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is lost"
        assert cached <= set(self._content), "a cached block has no content"
        assert not free & set(self._content), "a free block has content"
        assert {c.key: b for b, c in self._content.items()} == self._by_key, "the index is not the content"
