"""Caches of several requests as one cache with a batch row for each, and back.

Works on whatever transformers keeps in its caches: tensors have the batch in front, and those that grow with the
sequence are padded on the left.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from hf_cb.core import Request

# what has tensors inside; the last one is not in every version
_NAMES = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
_HOLDERS = tuple(getattr(cache_utils, name) for name in _NAMES if hasattr(cache_utils, name))
# the dimension of a tensor, by its name, that grows with the sequence
_GROWING = {"keys": -2, "values": -2, "indexer_keys": 1, "attention_mask": -1, "position_ids": -1}
_LENGTH = "cumulative_length"  # the name of a number that does


class Lanes:
    """The caches of live requests. Those that ran as one batch stay one batch; others join and leave it."""

    def __init__(self) -> None:
        self._own: dict[Request, Any] = {}  # None for a request that is a row of `_joined`
        self._lengths: dict[Request, int] = {}
        self._rows: list[Request | None] = []  # None: has been forgotten
        self._joined: Any = None
        self._longest = 0  # tokens of the longest row, which may be forgotten

    def __len__(self) -> int:
        return len(self._own)

    def put(self, request: Request, cache: Any, length: int = 0) -> None:
        """A request's cache; `length` is the number of tokens in it, if it has anything that grows with them."""
        self.forget(request)
        self._own[request], self._lengths[request] = cache, length

    def forget(self, request: Request) -> None:
        self._own.pop(request, None)
        self._lengths.pop(request, None)
        if request in self._rows:
            self._rows[self._rows.index(request)] = None
            if not any(self._rows):
                self._joined, self._rows = None, []

    def length(self, request: Request) -> int | None:
        """How many tokens are in a request's cache; None: it has none."""
        return self._lengths.get(request)

    def one(self, request: Request) -> Any:
        """A request's own cache."""
        if request in self._rows:
            self._leave(request)
        return self._own[request]

    def together(self, requests: list[Request]) -> tuple[Any, list[Request]]:
        """One cache with a row for each of these requests, and their order in it."""
        if set(self._rows) != set(requests):
            for request in [r for r in self._rows if r is not None and r not in requests]:
                self._leave(request)
            stay = [i for i, r in enumerate(self._rows) if r is not None]
            rows = [r for r in self._rows if r is not None]
            parts = [self._select(torch.tensor(stay), max(self._lengths[r] for r in rows))] if rows else []
            come = [r for r in requests if r not in rows]
            self._joined = join(parts + [self._own[r] for r in come])
            self._rows = [*rows, *come]
            self._longest = max(self._lengths[r] for r in requests)
            self._own |= dict.fromkeys(come)
        return self._joined, [r for r in self._rows if r is not None]

    def put_together(self, cache: Any, tokens: int) -> None:
        """What came of the batch, after a step of so many tokens."""
        self._joined = cache
        self._longest += tokens
        for request in self._rows:
            if request is not None:
                self._lengths[request] += tokens

    def _leave(self, request: Request) -> None:
        row = self._rows.index(request)
        length = self._lengths[request]
        cache = copy.deepcopy(self._select(slice(row, row + 1), length))  # a view would keep the whole batch alive
        self.put(request, cache, length)

    def _select(self, rows: Any, length: int) -> Any:
        return select(self._joined, rows, length, self._longest)


def join(parts: Sequence[Any], name: str = "") -> Any:
    """A cache whose batch rows are those of `parts`, in order; the parts keep their own memory.

    Raises:
        ValueError, RuntimeError: the parts differ in something that cannot be padded.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        if not first.dim() and not all(torch.equal(part, first) for part in parts):
            raise ValueError(f"{name} differs: {parts!r} cannot be one batch")
        return _join_tensors(parts, _GROWING.get(name)) if first.dim() else first
    if isinstance(first, dict):
        return {key: join([part[key] for part in parts], key) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(join(column, name) for column in zip(*parts, strict=True))
    if isinstance(first, _HOLDERS):
        whole = copy.copy(first)
        vars(whole).update(join([vars(part) for part in parts]))
        return whole
    if name == _LENGTH:
        return max(parts)
    if any(part is not first and part != first for part in parts[1:]):
        raise ValueError(f"{name or type(first).__name__} differs: {parts!r} cannot be one batch")
    return first


def _join_tensors(parts: Sequence[Tensor], growing: int | None) -> Tensor:
    if growing is None or not parts[0].numel():
        return torch.cat(list(parts))
    shape = list(parts[0].shape)
    shape[0], shape[growing] = sum(p.shape[0] for p in parts), max(p.shape[growing] for p in parts)
    whole = parts[0].new_zeros(shape)
    row = 0
    for part in parts:
        size = part.shape[growing]
        whole[row : row + part.shape[0]].narrow(growing, shape[growing] - size, size).copy_(part)
        row += part.shape[0]
    return whole


def select(whole: Any, rows: Tensor | slice, length: int = 0, longest: int = 0, name: str = "") -> Any:
    """Some batch rows of a joined cache, as a cache of their own; a slice shares its memory.

    The longest of them has `length` tokens and the longest of all `longest`: the padding in front of them is cut off.
    """
    if isinstance(whole, Tensor):
        if not whole.dim() or not whole.numel():
            return whole
        some = whole[rows if isinstance(rows, slice) else rows.to(whole.device)]
        if name not in _GROWING:
            return some
        size = some.shape[_GROWING[name]]
        own = min(size, length + max(0, size - longest))  # a window keeps fewer, a mask is one ahead
        return some.narrow(_GROWING[name], size - own, own)
    if isinstance(whole, dict):
        return {key: select(value, rows, length, longest, key) for key, value in whole.items()}
    if isinstance(whole, (list, tuple)):
        return type(whole)(select(value, rows, length, longest, name) for value in whole)
    if isinstance(whole, _HOLDERS):
        some = copy.copy(whole)
        vars(some).update(select(vars(whole), rows, length, longest))
        return some
    return length if name == _LENGTH else whole


def tensors(cache: Any) -> Iterator[Tensor]:
    """All tensors that a cache keeps."""
    if isinstance(cache, Tensor):
        yield cache
    elif isinstance(cache, _HOLDERS):
        yield from tensors(vars(cache))
    elif isinstance(cache, (dict, list, tuple)):
        for value in cache.values() if isinstance(cache, dict) else cache:
            yield from tensors(value)
