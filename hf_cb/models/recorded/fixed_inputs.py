"""The inputs of recorded steps, in a place that stays the same from step to step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_cb.kernels.device import sent_into
from hf_cb.models.drawing import Settings
from hf_cb.steps import NULL_BLOCK, Drawn, GroupBatch, StepBatch

NO_SLOT = -1
NOT_CARRIED = -1
ALIGNED = 4  # numbers: kernels are compiled anew for pointers that are not multiples of 16 bytes


class Columns(NamedTuple):
    """The numbers of a batch of n decodes in one array, of torch or numpy: `[n]` each, and slots for each group.

    The first five are int64, the next two int32, the last three float32. `carried`: the row of the step before whose
    token is the id, or NOT_CARRIED.
    """

    ids: Any
    positions: Any
    carried: Any
    seeds: Any
    slots: list[Any]
    seq_lens: Any
    top_ks: Any
    temperatures: Any
    top_ps: Any
    min_ps: Any


def bounds(size: int, num_groups: int) -> tuple[int, int, int]:
    """How many numbers lie from one column to the next, where the wide ones end, and where all of them do."""
    step = -(-size // ALIGNED) * ALIGNED
    return step, (4 + num_groups) * step, (4 + num_groups) * step + 5 * step // 2


def columns(whole: Any, size: int, num_groups: int, types: Any) -> Columns:
    """In an array of int64. `types`: torch or numpy, for the names of their types."""
    step, middle, end = bounds(size, num_groups)
    ids, positions, carried, seeds, *slots = whole[:middle].reshape(-1, step)[:, :size]
    words = whole[middle:end].view(types.int32).reshape(5, step)[:, :size]
    temperatures, top_ps, min_ps = words[2:].view(types.float32)
    return Columns(ids, positions, carried, seeds, slots, words[0], words[1], temperatures, top_ps, min_ps)


class FixedInputs:
    """Decode steps of up to `most` rows, the rest of a batch being padding; one size at a time.

    They come in one copy from the host: columns, and behind these the block tables, as wide as they need be, which go
    on to a place where rows have a fixed length, `max_blocks`. What was drawn last stays here too, as `tokens` and
    `logprobs`: the next step's ids may be among it.
    """

    def __init__(self, most: int, num_groups: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._num_groups = num_groups
        longest = bounds(most, num_groups)[-1] + (num_groups * most * max_blocks + 1) // 2
        self._whole = torch.zeros(longest, dtype=torch.int64, device=device)
        self._tables = torch.full((num_groups, most, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device)
        self._rows = torch.arange(most + 1, device=device), torch.arange(most + 1, dtype=torch.int32, device=device)
        self._block_size = block_size
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(most, dtype=torch.float32, device=device)
        self._batches: dict[int, StepBatch] = {}
        self._places: dict[int, tuple[int, tuple[Tensor, Tensor, Tensor]]] = {}

    def batch_of(self, size: int) -> StepBatch:
        """The first rows as a batch of that size. Its ids are the host's: `with_ids` has those of the device too."""
        if size not in self._batches:
            self._batches[size] = self._batch_of(size)
        return self._batches[size]

    def _batch_of(self, size: int) -> StepBatch:
        here, width = columns(self._whole, size, self._num_groups, torch), self._tables.shape[2]
        return StepBatch(
            requests=[],
            input_ids=here.ids,
            position_ids=here.positions,
            logits_rows=self._rows[0][:size],
            cu_seqlens_q=self._rows[1][: size + 1],
            seq_lens=here.seq_lens,
            query_lens_list=[1] * size,
            seq_lens_list=[width * self._block_size] * size,  # a bound: what is recorded holds for any length
            groups=[
                GroupBatch(slots, table[:size], [], []) for slots, table in zip(here.slots, self._tables, strict=True)
            ],
            block_size=self._block_size,
        )

    def with_ids(self, size: int) -> StepBatch:
        """The same with all its ids; to be recorded, as it looks at what was drawn last."""
        carried = columns(self._whole, size, self._num_groups, torch).carried
        batch = self.batch_of(size)
        drawn = self.tokens.index_select(0, carried.clamp(min=0)).clamp(min=0)  # negative: its request fails
        return replace(batch, input_ids=torch.where(carried == NOT_CARRIED, batch.input_ids, drawn))

    def settings(self, size: int) -> Settings:
        here = columns(self._whole, size, self._num_groups, torch)
        return Settings(here.temperatures, here.top_ps, here.min_ps, here.top_ks, here.seeds, here.positions + 1)

    def leave(self, drawn: Drawn) -> Drawn:
        """The first of `tokens` and `logprobs` are these; all of both."""
        self.tokens[: len(drawn.tokens)].copy_(drawn.tokens)
        if drawn.logprobs is None:
            return Drawn(self.tokens)
        self.logprobs[: len(drawn.logprobs)].copy_(drawn.logprobs)
        return Drawn(self.tokens, self.logprobs)

    def clear(self, size: int) -> None:
        """Nothing but padding."""
        self._send(size, None)

    def fill(self, batch: StepBatch, size: int) -> None:
        """The inputs are those of a batch of decodes, as the host has it, and padding behind it up to `size`."""
        carried = batch.carried
        if carried is not None and carried.tokens.data_ptr() != self.tokens.data_ptr():
            self.tokens[: len(carried.tokens)].copy_(carried.tokens)
        self._send(size, batch)

    def _send(self, size: int, batch: StepBatch | None) -> None:
        """Padding is written each time: a row may have been a request before, whose slots are somebody else's now."""
        width = 1 if batch is None else max(group.block_table.shape[1] for group in batch.groups)
        there, came, place = self._places_of(size, width)
        whole = np.zeros(len(there), np.int64)
        here, (_, _, end) = columns(whole, size, self._num_groups, np), bounds(size, self._num_groups)
        here.carried[:], here.seq_lens[:] = NOT_CARRIED, 1
        for slots in here.slots:
            slots[:] = NO_SLOT
        if batch is not None:
            _write(here, whole[end:].view(np.int32)[: came.numel()].reshape(came.shape), batch)
        sent_into(there, torch.from_numpy(whole))
        place.copy_(came)

    def _places_of(self, size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the host's array goes, where the tables are in it, and where these belong. Kept until the width is
        another: each operator of PyTorch gives the interpreter's lock away, and a busy thread keeps it for a while."""
        kept, places = self._places.get(size, (0, None))
        if places is None or kept != width:
            _, _, end = bounds(size, self._num_groups)
            total = self._num_groups * size * width
            whole = self._whole[: end + (total + 1) // 2]
            came = whole[end:].view(torch.int32)[:total].view(self._num_groups, size, width)
            places = whole, came, self._tables[:, :size, :width]
            self._places[size] = width, places
        return places


def _write(here: Columns, tables: np.ndarray, batch: StepBatch) -> None:
    rows = len(batch.seq_lens_list)
    here.ids[:rows], here.positions[:rows], here.seq_lens[:rows] = batch.input_ids, batch.position_ids, batch.seq_lens
    if batch.carried is not None:
        here.carried[batch.carried.places.numpy()] = batch.carried.rows
    if batch.draws is not None and batch.draws.rows is not None:
        settings = (here.temperatures, here.top_ks, here.top_ps, here.min_ps, here.seeds)  # as in `Draw`
        for column, values in zip(settings, zip(*batch.draws.rows, strict=True), strict=True):
            column[:rows] = values
    for g, group in enumerate(batch.groups):
        here.slots[g][:rows] = group.slot_mapping
        tables[g, :rows, : group.block_table.shape[1]] = group.block_table
