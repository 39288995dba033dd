"""Sampling on a CPU: penalties, temperature, top-k, top-p and min-p as `generate` has them, all rows in one call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_cb.kernels.cpu import library as lib

NOT_A_NUMBER, NO_TOKEN = -1, -2  # in place of a token: a score is NaN; no token has a probability above zero
_INTS, _FLOATS = array("i"), array("f")


class Draw(NamedTuple):
    """What one row is drawn with. `greedy`: the first of the largest, and the filters are ignored.

    The lists are of tokens (int32) and float32 amounts; tokens that the vocabulary does not have are passed over. First
    the scores of those `repeated` are divided by `repetition`, or multiplied if they are negative; then those `banned`
    become -infinity; then the amounts are `added`. A row with any of these is for one draw only.
    """

    row: int
    uniform: float = 0.0  # in [0, 1)
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    temperature: float = 1.0
    greedy: bool = False
    logprobs: bool = False  # sampled rows get one in any case
    repetition: float = 1.0
    repeated: array[int] = _INTS
    banned: array[int] = _INTS
    added: array[int] = _INTS
    amounts: array[float] = _FLOATS


class Drawn(NamedTuple):
    """A token, or one of the two above; its log-probability among those that are left, and how many these are."""

    token: int
    logprob: float
    kept: int


def sample(
    table: lib.Table, workspace: lib.Workspace, logits: Tensor, draws: Sequence[Draw], threads: int
) -> list[Drawn]:
    """A token for each draw from logits `[S, V]`, float32.

    A row's result depends on that row and its draw alone. The logits are afterwards what they were.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"float32 logits [S, V] are wanted, not {logits.dtype} {tuple(logits.shape)}.")
    if not all(0 <= draw.row < logits.shape[0] for draw in draws):
        raise IndexError(f"A draw is from none of the {logits.shape[0]} rows.")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows = (lib.Draw * len(draws))(*map(_as_struct, draws))
    shape = (logits.stride(0), logits.shape[1])
    lib.check(table.sample(workspace.handle, logits.data_ptr(), *shape, rows, len(rows), threads))
    return [Drawn(row.token, row.logprob, row.kept) for row in rows]


def _as_struct(draw: Draw) -> tuple[Any, ...]:
    plain = draw[:8]
    if not (draw.repeated or draw.banned or draw.added):
        return plain
    if len(draw.added) != len(draw.amounts):
        raise ValueError(f"{len(draw.added)} tokens are to be added to, and there are {len(draw.amounts)} amounts.")
    lists = (draw.repeated, draw.banned, draw.added, draw.amounts)
    pointers = [a.buffer_info()[0] for a in lists]
    return (*plain, 0, 0.0, 0, *pointers, *map(len, lists[:3]), draw.repetition)
