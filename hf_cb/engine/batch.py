"""StepPlan to StepBatch: the flat tensors of a step, built once.

All of them lie in two arrays, one of each width, so that a step costs two allocations and two copies to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

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
    ids = [t for p in parts for t in _token_ids(p)]
    tables = [[p.request.tables[g] for p in parts] for g in range(num_groups)]
    flat, widths = zip(*map(_padded, tables), strict=True)
    columns = _decode_columns(starts, tables, block_size) if decodes else _columns(parts, flat, block_size)
    cu_seqlens, positions, rows, *slots = columns
    input_ids, position_ids, logits_rows, *slot_mappings = _together([ids, positions, rows, *slots], np.int64, device)
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
                block_table=block_tables[g].view(-1, widths[g]),
                copies=[(source, target) for p in parts for group, source, target in p.copies if group == g],
                cleared=[block for p in parts for group, block in p.new_blocks if group == g],
            )
            for g in range(num_groups)
        ],
        block_size=block_size,
    )


def _decode_columns(starts: list[int], tables: list[list[list[int]]], block_size: int) -> list[list[int]]:
    """cu_seqlens `[R + 1]`, positions `[T]`, logits rows `[S]` and each group's slot mapping `[T]`; T, R and S are one.

    In plain lists: after a forward the processor's caches hold weights, and small numpy calls cost more than they save.
    """
    upto = list(range(len(starts) + 1))
    slots = [
        [table[at // block_size] * block_size + at % block_size for table, at in zip(group, starts, strict=True)]
        for group in tables
    ]
    return [upto, starts, upto[:-1], *slots]


def _columns(parts: Sequence[PlanPart], flat: Sequence[list[int]], block_size: int) -> list[np.ndarray]:
    """The same for any step."""
    counts = [p.num_tokens for p in parts]
    cu_seqlens = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(counts, out=cu_seqlens[1:])
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - [p.start for p in parts], counts)
    samples = np.array([p.samples for p in parts], dtype=np.int64)
    ends = np.repeat(cu_seqlens[1:] - samples, samples)  # first sampled row of each part, for each of its samples
    rows = ends + np.arange(len(ends)) - np.repeat(np.cumsum(samples) - samples, samples)
    row_of_token, blocks, offsets = np.repeat(np.arange(len(parts)), counts), *divmod(positions, block_size)
    tables = [np.array(table, dtype=np.int64).reshape(len(parts), -1) for table in flat]
    return [cu_seqlens, positions, rows, *(table[row_of_token, blocks] * block_size + offsets for table in tables)]


def _token_ids(part: PlanPart) -> list[int]:
    own = part.request.token_ids[part.start : part.start + part.num_tokens - len(part.drafts)]
    return own + part.drafts if part.drafts else own


def _padded(tables: Sequence[list[int]]) -> tuple[list[int], int]:
    """A block table `[R, max_blocks]` row by row, padded with NULL_BLOCK, and its width."""
    width = max(map(len, tables))
    flat: list[int] = []
    for table in tables:
        flat += table
        flat += [NULL_BLOCK] * (width - len(table))
    return flat, width


def _together(arrays: Sequence[Sequence[int] | np.ndarray], dtype: type, device: torch.device) -> Sequence[Tensor]:
    """These arrays as tensors on the device, in one piece of memory."""
    sizes = [len(array) for array in arrays]
    whole: np.ndarray
    if any(isinstance(array, np.ndarray) for array in arrays):
        whole = np.concatenate([np.asarray(array, dtype=dtype) for array in arrays])
    else:
        whole = np.array(list(chain.from_iterable(arrays)), dtype=dtype)
    return torch.from_numpy(whole).to(device).split(sizes)
