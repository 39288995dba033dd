"""StepPlan to StepBatch: the flat tensors of a step, built once.

All of them lie in two arrays, one of each width, so that a step costs two allocations and two copies to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hf_cb.core import NULL_BLOCK, GroupBatch, PlanPart, StepBatch, StepPlan


def build(plan: StepPlan, num_groups: int, block_size: int, device: torch.device) -> StepBatch:
    """Tensors on `device`."""
    parts = plan.parts
    counts, starts = [p.num_tokens for p in parts], [p.start for p in parts]
    seq_lens = [start + count for start, count in zip(starts, counts, strict=True)]
    decodes = max(counts) == 1 and all(p.samples == 1 for p in parts)  # most steps: each part is one token and one row
    positions, cu_seqlens, rows, row_of_token = _decode_rows(starts) if decodes else _rows(parts, counts, starts)
    ids = [t for p in parts for t in _token_ids(p)]
    tables = [_table([p.request.tables[g] for p in parts]) for g in range(num_groups)]
    offsets = positions % block_size
    slots = [t[row_of_token, positions // block_size].astype(np.int64) * block_size + offsets for t in tables]
    input_ids, position_ids, logits_rows, *slot_mappings = _together([ids, positions, rows, *slots], np.int64, device)
    flat = [table.ravel() for table in tables]
    cu_seqlens_q, lens, *block_tables = _together([cu_seqlens, seq_lens, *flat], np.int32, device)
    return StepBatch(
        requests=[p.request for p in parts],
        input_ids=input_ids,
        position_ids=position_ids,
        logits_rows=logits_rows,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=lens,
        query_lens_list=counts,
        seq_lens_list=seq_lens,
        groups=[
            GroupBatch(
                slot_mapping=slot_mappings[g],
                block_table=block_tables[g].view(tables[g].shape),
                copies=[(source, target) for p in parts for group, source, target in p.copies if group == g],
                cleared=[block for p in parts for group, block in p.new_blocks if group == g],
            )
            for g in range(num_groups)
        ],
        block_size=block_size,
    )


def _decode_rows(starts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions `[T]`, cu_seqlens `[R + 1]`, logits rows `[S]` and the part of each token `[T]`: T, R and S are one."""
    upto = np.arange(len(starts) + 1)
    return np.array(starts), upto, upto[:-1], upto[:-1]


def _rows(
    parts: Sequence[PlanPart], counts: Sequence[int], starts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The same for any step."""
    cu_seqlens = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(counts, out=cu_seqlens[1:])
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - starts, counts)
    samples = np.array([p.samples for p in parts], dtype=np.int64)
    ends = np.repeat(cu_seqlens[1:] - samples, samples)  # first sampled row of each part, for each of its samples
    rows = ends + np.arange(len(ends)) - np.repeat(np.cumsum(samples) - samples, samples)
    return positions, cu_seqlens, rows, np.repeat(np.arange(len(parts)), counts)


def _token_ids(part: PlanPart) -> list[int]:
    own = part.request.token_ids[part.start : part.start + part.num_tokens - len(part.drafts)]
    return own + part.drafts if part.drafts else own


def _table(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """A block table `[R, max_blocks]` int32, padded with NULL_BLOCK."""
    block_table = np.full((len(tables), max(map(len, tables))), NULL_BLOCK, dtype=np.int32)
    for row, table in zip(block_table, tables, strict=True):
        row[: len(table)] = table
    return block_table


def _together(arrays: Sequence[Sequence[int] | np.ndarray], dtype: type, device: torch.device) -> Sequence[Tensor]:
    """These arrays as tensors on the device, in one piece of memory."""
    sizes = [len(array) for array in arrays]
    whole: np.ndarray = np.empty(sum(sizes), dtype=dtype)
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        whole[at : at + size] = array
        at += size
    return torch.from_numpy(whole).to(device).split(sizes)
