"""Greedy sampling in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The token with the largest of `logits [S, V]` in each row, int64 `[S]`, -1 where one is NaN; and those logits."""
    tokens = logits.argmax(-1)
    best = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(best.isnan(), -1, tokens), best
