"""One call of `generate`, as its decoding loop gets it: everything merged, checked and built."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from hf_cb.config import EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Call:
    """What `_sample` was given.

    `input_ids [R, n]` int64 has a row for each sequence that is wanted: `num_return_sequences` in a row for one prompt.
    `inputs` are the model's other inputs; `options` the engine's.
    """

    model: PreTrainedModel
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    synced_gpus: bool = False
    streamer: Any = None
    inputs: dict[str, Any] = field(default_factory=dict)
    options: EngineConfig = field(default_factory=EngineConfig)

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def width(self) -> int:
        """Tokens of a row before the first new one, padding included."""
        return self.input_ids.shape[1]

    @property
    def rows_per_prompt(self) -> int:
        return self.config.num_return_sequences or 1

    @cached_property
    def mask(self) -> Tensor:
        """`[R, n]`; `generate` leaves it out where it is all ones."""
        given = self.inputs.get("attention_mask")
        return torch.ones_like(self.input_ids) if given is None else given

    @cached_property
    def padding(self) -> list[int]:
        """Each row's padding tokens, all of them on the left."""
        lengths: list[int] = (self.mask != 0).sum(dim=1).tolist()
        return [self.width - length for length in lengths]

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Each row's own tokens."""
        rows: list[list[int]] = self.input_ids.tolist()
        return [row[pad:] for row, pad in zip(rows, self.padding, strict=True)]

    @cached_property
    def max_new_tokens(self) -> int:
        """0 or less if nothing says when to end."""
        lengths = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        return min(lengths) - self.width if lengths else 0

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        found = [c.eos_token_id for c in self.criteria if type(c) is EosTokenCriteria]
        return frozenset(i for tensor in found for i in tensor.flatten().tolist())

    @property
    def pads_finished_rows(self) -> bool:
        """Whether a row that has ended is padded: `generate` lets it go on where there is no end-of-sequence token."""
        return any(hasattr(c, "eos_token_id") for c in self.criteria)

    @property
    def pad_token_id(self) -> int | None:
        tensor = self.config._pad_token_tensor
        return None if tensor is None else int(tensor.item())

    def wants(self, output: str) -> bool:
        """Whether `output_scores`, `output_logits`, ... is asked for, where it can be returned."""
        return bool(self.config.return_dict_in_generate and getattr(self.config, output))

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to see the tokens of each step: a streamer, or a criterion that the engine does not
        have. Those are asked in the caller's thread (`lockstep`)."""
        known = (MaxLengthCriteria, EosTokenCriteria)
        return self.streamer is not None or any(type(c) not in known for c in self.criteria)
