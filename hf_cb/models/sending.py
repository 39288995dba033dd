"""A step's numbers on their way from the host to a model's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_cb.kernels.device import sent
from hf_cb.steps import StepBatch


def to_device(batch: StepBatch, device: torch.device) -> StepBatch:
    """The batch with all its input ids on a device, in one copy for each width of numbers; itself if it is there."""
    carried = batch.carried
    if carried is None and batch.input_ids.device == device:
        return batch
    slots, tables = [g.slot_mapping for g in batch.groups], [g.block_table for g in batch.groups]
    places = [] if carried is None else [carried.places, carried.rows]
    longs = _together([batch.input_ids, batch.position_ids, batch.logits_rows, *slots, *places], device)
    cu_seqlens, lens, *tables = _together([batch.cu_seqlens_q, batch.seq_lens, *tables], device)
    ids, positions, rows, *longs = longs
    if carried is not None:
        to, source = longs[-2:]
        ids.index_copy_(0, to, carried.tokens.index_select(0, source).clamp(min=0))
    groups = [
        replace(group, slot_mapping=slot_mapping, block_table=table)
        for group, slot_mapping, table in zip(batch.groups, longs[: len(slots)], tables, strict=True)
    ]
    return replace(
        batch,
        input_ids=ids,
        position_ids=positions,
        logits_rows=rows,
        cu_seqlens_q=cu_seqlens,
        seq_lens=lens,
        groups=groups,
        carried=None,
    )


def _together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    whole = sent(torch.cat([tensor.reshape(-1) for tensor in tensors]), device)
    pieces = whole.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
