"""StepPlan to StepBatch: the flat tensors of a step, built once, on the host.

All of them lie in two arrays, one of each width, so that a step costs two allocations.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
    # most steps: each part is one token and one row
    decodes = max(counts) == 1 and all(p.samples + p.prompt_rows == 1 for p in parts)
    ids, carried = _ids(parts, unread)
    tables = [[p.request.tables[g] for p in parts] for g in range(num_groups)]
    columns = _decode_columns(starts, tables, block_size) if decodes else _columns(parts, tables, block_size)
    cu_seqlens, positions, rows, *slots = columns
    longs = [ids, positions, rows, *carried, *slots]
    input_ids, position_ids, logits_rows, to, source, *slot_mappings = _together(longs, "q")
    cu_seqlens_q, lens, *block_tables = _together([cu_seqlens, seq_lens, *map(_padded, tables)], "i")
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
                block_table=block_tables[g].view(len(parts), -1),
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


def _columns(parts: Sequence[PlanPart], tables: list[list[array[int]]], block_size: int) -> list[np.ndarray]:
    """The same for any step."""
    counts = [p.num_tokens for p in parts]
    cu_seqlens = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(counts, out=cu_seqlens[1:])
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - [p.start for p in parts], counts)
    samples = np.array([p.samples + p.prompt_rows for p in parts], dtype=np.int64)
    ends = np.repeat(cu_seqlens[1:] - samples, samples)  # first wanted row of each part, for each of them
    rows = ends + np.arange(len(ends)) - np.repeat(np.cumsum(samples) - samples, samples)
    # of each table the blocks that this step writes to, end to end, and where in these a token's own is
    spans = [(p.start // block_size, (p.start + p.num_tokens - 1) // block_size + 1) for p in parts]
    lengths = [end - first for first, end in spans]
    skipped = np.cumsum([0, *lengths[:-1]]) - [first for first, _ in spans]
    blocks, offsets = divmod(positions, block_size)
    places = blocks + np.repeat(skipped, counts)
    slots = []
    for group in tables:
        written = b"".join([table[first:end] for table, (first, end) in zip(group, spans, strict=True)])
        slots.append(np.frombuffer(written, dtype=np.int32)[places].astype(np.int64) * block_size + offsets)
    return [cu_seqlens, positions, rows, *slots]


def _ids(parts: Sequence[PlanPart], unread: Unread | None) -> tuple[list[int], tuple[list[int], list[int]]]:
    """The token ids `[T]`, and for those that only the device knows their places here and their rows there."""
    ids: list[int] = []
    places: list[int] = []
    rows: list[int] = []
    for part in parts:
        known, end = part.request.token_ids, part.start + part.num_tokens - len(part.drafts)
        if part.start < len(known):
            ids += known[part.start : end]
            ids += part.drafts
        if end > len(known):
            assert unread is not None
            row = unread.row_of[part.request]
            if isinstance(unread.tokens, list):
                ids.append(unread.tokens[row])
                continue
            places.append(len(ids))
            rows.append(row)
            ids.append(0)
    return ids, (places, rows)


def _padded(tables: Sequence[array[int]]) -> array[int]:
    """A block table `[R, max_blocks]` row by row, padded with NULL_BLOCK."""
    width = max(map(len, tables))
    flat = array("i")
    for table in tables:
        flat += table
        if len(table) < width:
            flat += array("i", [NULL_BLOCK]) * (width - len(table))
    return flat


def _together(columns: Sequence[list[int] | array[int] | np.ndarray], code: str) -> Sequence[Tensor]:
    """These columns as tensors of that type, named by its letter in `array`, in one piece of memory."""
    pieces: list[Any] = [array(code, c) if isinstance(c, list) else np.asarray(c, dtype=code) for c in columns]
    whole = np.frombuffer(bytearray().join(pieces), dtype=code)
    return torch.from_numpy(whole).split_with_sizes([len(c) for c in columns])
