"""A PagedModel whose decode steps are recorded once for each of some batch sizes, and replayed.

A step of a small model is thousands of kernel launches, and telling a GPU to do them takes longer than doing them. A
decode step always does the same, but for the numbers in its inputs: so the inputs get a fixed place, a batch is padded
to the next size of the ladder, and everything from the tokens of the step before to those of this one is one replay, or
to its logits where more than these is needed to choose. Rows of padding write nothing, and read one key of the null
block. Steps with prompt chunks run as ever.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_cb.errors import describe
from hf_cb.kernels.reference.sampling import best_tokens
from hf_cb.models.drawing import DrawTokens
from hf_cb.models.guard import Guard, Places
from hf_cb.models.paged import PagedModel
from hf_cb.models.recorded.capture import Capture, MakeCapture, rehearse
from hf_cb.models.recorded.fixed_inputs import FixedInputs
from hf_cb.steps import Drawn, Draws, StepBatch

logger = logging.getLogger("hf_cb")

Ending = Literal["best", "drawn", "logits"]  # what a recorded step leaves


def ladder(most: int) -> list[int]:
    """The batch sizes that are recorded, the largest first: at most a third of a batch is padding from 16 on."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    return sorted({most, *(size for size in sizes if size < most)}, reverse=True)


@dataclass
class Recording:
    """What replays the steps of a size, and what it leaves: for all sizes in the same place."""

    capture: Capture
    out: Tensor | Drawn


class CapturedModel(PagedModel):
    """See the module's docstring.

    Args:
        captures: for a device, what makes empty recordings that share a pool of memory.
        draw: what draws the tokens of requests that are not greedy; None: something else does, from the logits.
        most_rows: of the largest batch.
        max_blocks: the widest block table.
    """

    def __init__(
        self,
        captures: Callable[[torch.device], MakeCapture],
        draw: DrawTokens | None,
        most_rows: int,
        max_blocks: int,
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._captures = captures
        self._draw = draw
        self._make_capture: MakeCapture | None = None
        self._sizes = ladder(most_rows)
        self._max_blocks = max_blocks
        self._recordings: dict[Hashable, Recording] = {}
        self._inputs: FixedInputs | None = None
        self._guard = Guard(self.model)
        self._places: Places | None = None
        self.why_not = "it has state beside its blocks, or rotary factors by length" if not self.overlaps else None

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> Tensor | Drawn:
        rows = len(batch.seq_lens_list)
        size = self._size_for(batch)
        recording = self._recording(size, self._ending(batch.draws)) if size and self._may_record() else None
        if recording is None:
            return super().forward(batch)
        self._prepare_blocks(batch)
        assert self._inputs is not None
        with self._turn:
            self._inputs.fill(batch, size)
            recording.capture.replay()
        out = recording.out
        return out[:rows] if isinstance(out, Tensor) else out.first(rows)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Records now what requests would wait for later."""
        if self.model.training:
            return  # somebody else's turn
        self.new_requests()
        endings: list[Ending] = ["best", "logits" if self._draw is None else "drawn"]
        for ending in endings:
            if self._may_record():
                self._recording(self._sizes[0], ending)

    def _size_for(self, batch: StepBatch) -> int:
        """Of the ladder's; 0: not a step that is recorded."""
        rows, most = len(batch.seq_lens_list), self._sizes[0]
        carried = 0 if batch.carried is None else len(batch.carried.tokens)
        if len(batch.input_ids) != rows or len(batch.logits_rows) != rows or max(rows, carried) > most:
            return 0
        return next(size for size in reversed(self._sizes) if size >= rows)

    def _ending(self, draws: Draws | None) -> Ending:
        if draws is None or (draws.rows is not None and self._draw is None):
            return "logits"
        return "best" if draws.rows is None else "drawn"

    def _may_record(self) -> bool:
        if self.why_not is not None or not self._guard.is_intact() or self._guard.has_hooks():
            return False
        return self._is_steady()

    def _recording(self, size: int, ending: Ending) -> Recording | None:
        if self._places is not None and not self._places.are_same():
            self._recordings.clear()  # they read where the weights were
            self._places = self._make_capture = None
        key = self._key(size, ending)
        if key is not None and key not in self._recordings:
            self._record(ending)
        return self._recordings.get(key)

    def _is_steady(self) -> bool:
        """Whether steps are computed as they were when they were recorded."""
        return True

    def _key(self, size: int, ending: Ending) -> Hashable:
        """Everything that Python decides in a step of that size; None: something cannot be recorded."""
        if self._inputs is None:
            shape = (self._sizes[0], len(self.groups), self._max_blocks, self.block_size)
            self._inputs = FixedInputs(*shape, self.device)
        kernels = self.backend.graph_key(self._inputs.batch_of(size))
        return None if kernels is None else (size, ending, kernels)

    def _record(self, ending: Ending) -> None:
        """All sizes, the largest first: the others then live in its memory."""
        self._places = self._places or Places(self.model)
        self._make_capture = self._make_capture or self._captures(self.device)
        assert self._inputs is not None
        tokens = self._inputs.tokens.clone()  # of a step that may be on its way
        out: Tensor | Drawn | None = None
        try:
            for size in self._sizes:
                self._inputs.clear(size)  # what is recorded may also be computed
                work = functools.partial(self._compute_all, size, ending, out)
                rehearse(work)
                capture = self._make_capture()
                recorded = capture.record(work)
                out = recorded if out is None else out
                self._recordings[self._key(size, ending)] = Recording(capture, out)
        except Exception as error:  # something in the model waits for the device, or decides by a value
            self.why_not = describe(error)
            self._recordings.clear()
            logger.warning("%s's decode steps are not recorded: %s", type(self.model).__name__, self.why_not)
        self._inputs.tokens.copy_(tokens)

    def _compute_all(self, size: int, ending: Ending, into: Any) -> Tensor | Drawn:
        """One step of that size on the inputs as they are. `into`: what the largest size left, to leave it there."""
        inputs = self._inputs
        assert inputs is not None
        logits = self._compute(inputs.with_ids(size))
        if ending == "logits":
            return logits if into is None else into[:size].copy_(logits)
        if ending == "best":
            return inputs.leave(Drawn(best_tokens(logits)[0]))
        assert self._draw is not None
        return inputs.leave(self._draw(logits, inputs.settings(size)))
