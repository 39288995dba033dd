"""Random numbers that depend on a seed and a position and on nothing else, so that they survive any batching."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a seed and a position: two rounds of splitmix64 (Steele et al., 2014)."""
    return (_splitmix(_splitmix(seed & _MASK) ^ position) >> 11) * 2.0**-53


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive_seed(seed: int, child: int) -> int:
    """The seed of the i-th of several sequences for one prompt; the first keeps the seed itself."""
    return seed if child == 0 else _splitmix(_splitmix(seed & _MASK) + child)


def seed_sequence(seed: int | None) -> Iterator[int] | None:
    """Seeds for one request after another, all from one; None if there is none."""
    # not a generator expression: those refuse to be advanced by two threads at once
    return None if seed is None else map(functools.partial(derive_seed, seed), itertools.count())
