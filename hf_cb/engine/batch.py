"""StepPlan to StepBatch: the flat tensors of a step, built once, on the host.

All of them lie in two arrays, one of each width, so that a step costs two allocations.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_cb.engine.flight import Unread
from hf_cb.steps import NULL_BLOCK, Carried, GroupBatch, PlanPart, StepBatch, StepPlan


def build(plan: StepPlan, num_groups: int, block_size: int, unread: Unread | None = None) -> StepBatch:
    """`unread`: the tokens of a step that is not committed yet, which this one is built on."""
    parts = plan.parts
    counts, starts = [p.num_tokens for p in parts], [p.start for p in parts]
    seq_lens = [start + count for start, count in zip(starts, counts, strict=True)]
    decodes = max(counts) == 1 and all(
        p.samples + p.prompt_rows == 1 for p in parts
    )  # most steps: each part is one token and one row
    ids, carried = _ids(parts, unread)
    tables = [[p.request.tables[g] for p in parts] for g in range(num_groups)]
    flat, widths = zip(*map(_padded, tables), strict=True)
    columns = _decode_columns(starts, tables, block_size) if decodes else _columns(parts, flat, block_size)
    cu_seqlens, positions, rows, *slots = columns
    longs = [ids, positions, rows, *carried, *slots]
    input_ids, position_ids, logits_rows, to, source, *slot_mappings = _together(longs, np.int64)
    cu_seqlens_q, lens, *block_tables = _together([cu_seqlens, seq_lens, *flat], np.int32)
    unknown = None
    if unread is not None and isinstance(unread.tokens, Tensor) and len(to):
        unknown = Carried(to, source, unread.tokens)
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
                saves=[(block, to) for group, block, to in plan.saves if group == g],
                loads=[(source, block) for p in parts for group, source, block in p.loads if group == g],
            )
            for g in range(num_groups)
        ],
        block_size=block_size,
        carried=unknown,
    )


def _decode_columns(starts: list[int], tables: list[list[array[int]]], block_size: int) -> list[list[int]]:
    """cu_seqlens `[R + 1]`, positions `[T]`, logits rows `[S]` and each group's slot mapping `[T]`; T, R and S are one.

    In plain lists: after a forward the processor's caches hold weights, and small numpy calls cost more than they save.
    """
    upto = list(range(len(starts) + 1))
    slots = [
        [table[at // block_size] * block_size + at % block_size for table, at in zip(group, starts, strict=True)]
        for group in tables
    ]
    return [upto, starts, upto[:-1], *slots]


def _columns(parts: Sequence[PlanPart], flat: Sequence[np.ndarray], block_size: int) -> list[np.ndarray]:
    """The same for any step."""
    counts = [p.num_tokens for p in parts]
    cu_seqlens = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(counts, out=cu_seqlens[1:])
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - [p.start for p in parts], counts)
    samples = np.array([p.samples + p.prompt_rows for p in parts], dtype=np.int64)
    ends = np.repeat(cu_seqlens[1:] - samples, samples)  # first wanted row of each part, for each of them
    rows = ends + np.arange(len(ends)) - np.repeat(np.cumsum(samples) - samples, samples)
    row_of_token, blocks, offsets = np.repeat(np.arange(len(parts)), counts), *divmod(positions, block_size)
    found = [table.reshape(len(parts), -1)[row_of_token, blocks].astype(np.int64) for table in flat]
    return [cu_seqlens, positions, rows, *(block * block_size + offsets for block in found)]


def _ids(parts: Sequence[PlanPart], unread: Unread | None) -> tuple[list[int], tuple[list[int], list[int]]]:
    """The token ids `[T]`, and for those that only the device knows their places here and their rows there."""
    ids: list[int] = []
    places: list[int] = []
    rows: list[int] = []
    for part in parts:
        request, end = part.request, part.start + part.num_tokens - len(part.drafts)
        ids += request.token_ids[part.start : end]
        ids += part.drafts
        if end > len(request.token_ids):
            assert unread is not None
            row = unread.row_of[request]
            if isinstance(unread.tokens, list):
                ids.append(unread.tokens[row])
                continue
            places.append(len(ids))
            rows.append(row)
            ids.append(0)
    return ids, (places, rows)


def _padded(tables: Sequence[array[int]]) -> tuple[np.ndarray, int]:
    """A block table `[R, max_blocks]` int32 row by row, padded with NULL_BLOCK, and its width."""
    width = max(map(len, tables))
    nothing = array("i", [NULL_BLOCK]) * (width - min(map(len, tables)))
    pieces: list[Any] = []
    for table in tables:
        pieces += (table, nothing[: width - len(table)])
    return np.frombuffer(b"".join(pieces), dtype=np.int32), width


def _together(arrays: Sequence[Sequence[int] | np.ndarray], dtype: type) -> Sequence[Tensor]:
    """These arrays as tensors, in one piece of memory."""
    sizes = [len(array) for array in arrays]
    whole: np.ndarray
    if any(isinstance(array, np.ndarray) for array in arrays):
        whole = np.concatenate([np.asarray(array, dtype=dtype) for array in arrays])
    else:
        whole = np.array(list(chain.from_iterable(arrays)), dtype=dtype)
    return torch.from_numpy(whole).split(sizes)
