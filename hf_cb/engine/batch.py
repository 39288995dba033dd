"""StepPlan to StepBatch: the flat tensors of a step, built once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hf_cb.core import NULL_BLOCK, GroupBatch, PlanPart, StepBatch, StepPlan


def build(plan: StepPlan, num_groups: int, block_size: int, device: torch.device) -> StepBatch:
    """Tensors on `device`; one copy from the host for each."""
    parts = plan.parts
    counts = np.array([p.num_tokens for p in parts], dtype=np.int64)
    starts = np.array([p.start for p in parts], dtype=np.int64)
    cu_seqlens = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(counts, out=cu_seqlens[1:])
    row_of_token = np.repeat(np.arange(len(parts)), counts)
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - starts, counts)
    samples = np.array([p.samples for p in parts], dtype=np.int64)
    ends = np.repeat(cu_seqlens[1:] - samples, samples)  # first sampled row of each part, for each of its samples
    logits_rows = ends + np.arange(len(ends)) - np.repeat(np.cumsum(samples) - samples, samples)
    ids = [t for p in parts for t in _token_ids(p)]
    return StepBatch(
        requests=[p.request for p in parts],
        input_ids=torch.tensor(ids, dtype=torch.long, device=device),
        position_ids=_to(positions, device),
        logits_rows=_to(logits_rows, device),
        cu_seqlens_q=_to(cu_seqlens.astype(np.int32), device),
        seq_lens=_to((starts + counts).astype(np.int32), device),
        query_lens_list=counts.tolist(),
        seq_lens_list=(starts + counts).tolist(),
        groups=[_group(parts, g, row_of_token, positions, block_size, device) for g in range(num_groups)],
        block_size=block_size,
    )


def _token_ids(part: PlanPart) -> list[int]:
    own = part.request.token_ids[part.start : part.start + part.num_tokens - len(part.drafts)]
    return own + part.drafts if part.drafts else own


def _group(
    parts: list[PlanPart],
    group: int,
    row_of_token: np.ndarray,
    positions: np.ndarray,
    block_size: int,
    device: torch.device,
) -> GroupBatch:
    tables = [p.request.tables[group] for p in parts]
    block_table = np.full((len(parts), max(map(len, tables))), NULL_BLOCK, dtype=np.int32)
    for row, table in zip(block_table, tables, strict=True):
        row[: len(table)] = table
    blocks = block_table[row_of_token, positions // block_size].astype(np.int64)
    return GroupBatch(
        slot_mapping=_to(blocks * block_size + positions % block_size, device),
        block_table=_to(block_table, device),
        copies=[(source, target) for p in parts for g, source, target in p.copies if g == group],
        cleared=[block for p in parts for g, block in p.new_blocks if g == group],
    )


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
