"""Sampling on a CPU: temperature, top-k, top-p and min-p as `generate` has them, all rows in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_cb.kernels.cpu import library as lib

NOT_A_NUMBER, NO_TOKEN = -1, -2  # in place of a token: a score is NaN; no token has a probability above zero


class Draw(NamedTuple):
    """What one row is drawn with. `greedy`: the first of the largest, and the rest is ignored but `logprobs`."""

    row: int
    uniform: float = 0.0  # in [0, 1)
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    temperature: float = 1.0
    greedy: bool = False
    logprobs: bool = False  # sampled rows get one in any case


class Drawn(NamedTuple):
    """A token, or one of the two above; its log-probability among those that are left, and how many these are."""

    token: int
    logprob: float
    kept: int


def sample(
    table: lib.Table, workspace: lib.Workspace, logits: Tensor, draws: Sequence[Draw], threads: int
) -> list[Drawn]:
    """A token for each draw from logits `[S, V]`, float32.

    A row's result depends on that row and its draw alone.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"float32 logits [S, V] are wanted, not {logits.dtype} {tuple(logits.shape)}.")
    if not all(0 <= draw.row < logits.shape[0] for draw in draws):
        raise IndexError(f"A draw is from none of the {logits.shape[0]} rows.")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows = (lib.Draw * len(draws))(*draws)
    shape = (logits.stride(0), logits.shape[1])
    lib.check(table.sample(workspace.handle, logits.data_ptr(), *shape, rows, len(rows), threads))
    return [Drawn(row.token, row.logprob, row.kept) for row in rows]
