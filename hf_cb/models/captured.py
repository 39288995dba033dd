"""A PagedModel whose decode steps are recorded once for each of some batch sizes, and replayed.

A step of a small model is thousands of kernel launches, and telling a GPU to do them takes longer than doing them. A
decode step always does the same, but for the numbers in its inputs: so the inputs get a fixed place, a batch is padded
to the next size of the ladder, and everything from the ids to the logits (or the best tokens) is one replay. Rows of
padding write nothing, and read one key of the null block. Steps with prompt chunks run as ever.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_cb.errors import describe
from hf_cb.kernels.reference.sampling import best_tokens
from hf_cb.models.capture import Capture, MakeCapture, rehearse
from hf_cb.models.guard import Guard, Places
from hf_cb.models.paged import PagedModel
from hf_cb.steps import NULL_BLOCK, GroupBatch, StepBatch

logger = logging.getLogger("hf_cb")

NO_SLOT = -1


def ladder(most: int) -> list[int]:
    """The batch sizes that are recorded, the largest first: at most a third of a batch is padding from 16 on."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    return sorted({most, *(size for size in sizes if size < most)}, reverse=True)


class Inputs:
    """The inputs of decode steps in a fixed place, the same for all sizes, as one runs at a time: those of a batch, and
    then rows of padding. `most`: rows of the largest."""

    def __init__(self, most: int, num_groups: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._longs = torch.zeros(2 + num_groups, most, dtype=torch.int64, device=device)
        self._longs[2:] = NO_SLOT
        self._padding = self._longs.clone()
        self._tables = torch.full((num_groups, most, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device)
        self._lens = torch.ones(most, dtype=torch.int32, device=device)
        self._rows = torch.arange(most + 1, device=device), torch.arange(most + 1, dtype=torch.int32, device=device)
        self._block_size = block_size

    def of(self, size: int) -> StepBatch:
        """The first rows as a batch of that size."""
        width = self._tables.shape[2]
        return StepBatch(
            requests=[],
            input_ids=self._longs[0, :size],
            position_ids=self._longs[1, :size],
            logits_rows=self._rows[0][:size],
            cu_seqlens_q=self._rows[1][: size + 1],
            seq_lens=self._lens[:size],
            query_lens_list=[1] * size,
            seq_lens_list=[width * self._block_size] * size,  # a bound: what is recorded holds for any length
            groups=[
                GroupBatch(slots[:size], table[:size], [], [])
                for slots, table in zip(self._longs[2:], self._tables, strict=True)
            ],
            block_size=self._block_size,
        )

    def clear(self) -> None:
        """Nothing but padding: a row may have been a request before, whose slots are somebody else's now."""
        self._longs.copy_(self._padding)
        self._tables[:, :, 0] = NULL_BLOCK
        self._lens.fill_(1)

    def fill(self, batch: StepBatch) -> None:
        """The inputs are that batch's, and padding behind it."""
        self.clear()
        ours = self.of(len(batch.seq_lens_list))
        ours.input_ids.copy_(batch.input_ids)
        ours.position_ids.copy_(batch.position_ids)
        ours.seq_lens.copy_(batch.seq_lens)
        for mine, theirs in zip(ours.groups, batch.groups, strict=True):
            mine.slot_mapping.copy_(theirs.slot_mapping)
            mine.block_table[:, : theirs.block_table.shape[1]].copy_(theirs.block_table)


@dataclass
class Recording:
    """What replays the steps of a size, and where the result is: for all sizes in the same place."""

    capture: Capture
    out: Tensor


class CapturedModel(PagedModel):
    """See the module's docstring.

    Args:
        captures: for a device, what makes empty recordings that share a pool of memory.
        most_rows: of the largest batch.
        max_blocks: the widest block table.
    """

    def __init__(
        self, captures: Callable[[torch.device], MakeCapture], most_rows: int, max_blocks: int, *args: Any
    ) -> None:
        super().__init__(*args)
        self._captures = captures
        self._make_capture: MakeCapture | None = None
        self._sizes = ladder(most_rows)
        self._max_blocks = max_blocks
        self._recordings: dict[Hashable, Recording] = {}
        self._inputs: Inputs | None = None
        self._guard = Guard(self.model)
        self._places: Places | None = None
        self.why_not = "it has state beside its blocks, or rotary factors by length" if not self.overlaps else None

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> Tensor:
        recording = self._recording_for(batch)
        if recording is None:
            return super().forward(batch)
        self._prepare_blocks(batch)
        assert self._inputs is not None
        with self._turn:
            self._inputs.fill(batch)
            recording.capture.replay()
        return recording.out[: len(batch.seq_lens_list)]

    @torch.no_grad()
    def warm_up(self) -> None:
        """Records now what requests would wait for later."""
        if self.model.training:
            return  # somebody else's turn
        self.new_requests()
        for best in (True, False):
            if self._may_record():
                self._recording(self._sizes[0], best)

    def _recording_for(self, batch: StepBatch) -> Recording | None:
        rows = len(batch.seq_lens_list)
        if len(batch.input_ids) != rows or len(batch.logits_rows) != rows or rows > self._sizes[0]:
            return None
        size = next(size for size in reversed(self._sizes) if size >= rows)
        return self._recording(size, batch.best_is_enough) if self._may_record() else None

    def _may_record(self) -> bool:
        if self.why_not is not None or not self._guard.is_intact() or self._guard.has_hooks():
            return False
        return self._is_steady()

    def _recording(self, size: int, best: bool) -> Recording | None:
        if self._places is not None and not self._places.are_same():
            self._recordings.clear()  # they read where the weights were
            self._places = self._make_capture = None
        key = self._key(size, best)
        if key is not None and key not in self._recordings:
            self._record(best)
        return self._recordings.get(key)

    def _is_steady(self) -> bool:
        """Whether steps are computed as they were when they were recorded."""
        return True

    def _key(self, size: int, best: bool) -> Hashable:
        """Everything that Python decides in a step of that size; None: something cannot be recorded."""
        if self._inputs is None:
            shape = (self._sizes[0], len(self.groups), self._max_blocks, self.block_size)
            self._inputs = Inputs(*shape, self.device)
        kernels = self.backend.graph_key(self._inputs.of(size))
        return None if kernels is None else (size, best, kernels)

    def _record(self, best: bool) -> None:
        """All sizes, the largest first: the others then live in its memory."""
        self._places = self._places or Places(self.model)
        self._make_capture = self._make_capture or self._captures(self.device)
        assert self._inputs is not None
        out: Tensor | None = None
        try:
            for size in self._sizes:
                self._inputs.clear()  # what is recorded may also be computed
                work = functools.partial(self._compute_all, self._inputs.of(size), best, out)
                rehearse(work)
                capture = self._make_capture()
                recording = self._recordings[self._key(size, best)] = Recording(capture, capture.record(work))
                out = recording.out if out is None else out
        except Exception as error:  # something in the model waits for the device, or decides by a value
            self.why_not = describe(error)
            self._recordings.clear()
            logger.warning("%s's decode steps are not recorded: %s", type(self.model).__name__, self.why_not)

    def _compute_all(self, batch: StepBatch, best: bool, into: Tensor | None) -> Tensor:
        logits = self._compute(batch)
        out = best_tokens(logits)[0] if best else logits
        return out if into is None else into[: len(out)].copy_(out)
