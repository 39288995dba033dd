"""Penalties of many rows at once, in plain torch where the scores are; only the tokens concerned are looked at."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cb.kernels.device import sent
from hf_cb.penalties import Edits


def penalised(logits: Tensor, edits: Sequence[Edits | None]) -> Tensor:
    """A float32 copy of logits `[S, V]` with each row's edits, as transformers' processors would change it."""
    scores = logits.to(torch.float32, copy=True).contiguous()
    flat, (_, vocab) = scores.view(-1), scores.shape
    rows = [(i, e) for i, e in enumerate(edits) if e is not None]
    repeated = [(i, e.repeated, array("f", [e.repetition]) * len(e.repeated)) for i, e in rows if e.repeated]
    if repeated:
        places, factors = _flattened(repeated, vocab, scores.device)
        found = flat[places]
        flat[places] = torch.where(found < 0, found * factors, found / factors)
    banned = [(i, e.banned, array("f", [0.0]) * len(e.banned)) for i, e in rows if e.banned]
    if banned:
        flat.index_fill_(0, _flattened(banned, vocab, scores.device)[0], float("-inf"))
    added = [(i, e.added, e.amounts) for i, e in rows if e.added]
    if added:
        places, amounts = _flattened(added, vocab, scores.device)
        flat[places] += amounts
    return scores


def _flattened(
    lists: Sequence[tuple[int, array[int], array[float]]], vocab: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(row, tokens, numbers) as places in a flat [S * V], int64, and numbers, float32; without tokens past the end."""
    all_tokens, all_numbers = array("i"), array("f")
    for _, some_tokens, some_numbers in lists:
        all_tokens += some_tokens
        all_numbers += some_numbers
    tokens = torch.frombuffer(all_tokens, dtype=torch.int32).long()
    numbers = torch.frombuffer(all_numbers, dtype=torch.float32)
    counts = torch.tensor([len(t) for _, t, _ in lists])
    places = torch.tensor([i for i, _, _ in lists]).repeat_interleave(counts) * vocab + tokens
    known = (tokens >= 0) & (tokens < vocab)
    if not bool(known.all()):
        places, numbers = places[known], numbers[known]
    return sent(places, device), sent(numbers, device)
