"""Caches of several requests as one cache with a batch row for each, and back.

Works on whatever transformers keeps in its caches: every tensor has the batch in front.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, cat
from transformers import cache_utils

# what has tensors inside; the last one is not in every version
_NAMES = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer")
_HOLDERS = tuple(getattr(cache_utils, name) for name in _NAMES if hasattr(cache_utils, name))


def join(parts: Sequence[Any]) -> Any:
    """A cache whose batch rows are those of `parts`, in order; the parts keep their own memory.

    Raises:
        ValueError: the parts differ in something that is no tensor, such as a length.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return cat(list(parts)) if first.dim() else first
    if isinstance(first, dict):
        return {key: join([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(join(column) for column in zip(*parts, strict=True))
    if isinstance(first, _HOLDERS):
        whole = copy.copy(first)
        vars(whole).update(join([vars(part) for part in parts]))
        return whole
    if any(part is not first and part != first for part in parts[1:]):
        raise ValueError(f"{parts!r} cannot be one batch")
    return first


def take(whole: Any, row: int) -> Any:
    """Batch row `row` of a joined cache, as a cache of its own that shares its memory."""
    if isinstance(whole, Tensor):
        return whole[row : row + 1] if whole.dim() else whole
    if isinstance(whole, dict):
        return {key: take(value, row) for key, value in whole.items()}
    if isinstance(whole, (list, tuple)):
        return type(whole)(take(value, row) for value in whole)
    if isinstance(whole, _HOLDERS):
        one = copy.copy(whole)
        vars(one).update(take(vars(whole), row))
        return one
    return whole


def tensors(cache: Any) -> Iterator[Tensor]:
    """All tensors that a cache keeps."""
    if isinstance(cache, Tensor):
        yield cache
    elif isinstance(cache, _HOLDERS):
        yield from tensors(vars(cache))
    elif isinstance(cache, (dict, list, tuple)):
        for value in cache.values() if isinstance(cache, dict) else cache:
            yield from tensors(value)
