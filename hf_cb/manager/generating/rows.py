"""From the processors that `generate` has built for a padded batch to those of one row, as the engine sees it: alone,
and without its padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from hf_cb.core import SamplingParams
from hf_cb.options.recipe import Recipe
from hf_cb.penalties import Penalties
from hf_cb.warpers import as_numbers

if TYPE_CHECKING:
    from hf_cb.manager.generating.call import Call

# Their scores depend on the scores of their own row, and on nothing else
_BLIND = frozenset(
    getattr(transformers, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
)
# They look at their own row's ids too, and remember nothing
_BY_ROW = frozenset(
    {
        ExponentialDecayLengthPenalty,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        transformers.NoRepeatNGramLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
        transformers.WatermarkLogitsProcessor,
    }
)


def looks_across_rows(processor: Any) -> bool:
    """Whether what it does to a row may depend on the others, or on what it did before: true of anything unknown."""
    return type(processor) not in _BLIND | _BY_ROW


class RowRecipe(Recipe):
    """A prompt of a call: makes the SamplingParams of its rows, one after the other.

    Args:
        first: number of its first row.
    """

    def __init__(self, call: Call, first: int) -> None:
        super().__init__(call.model, call.config)
        self._call = call
        self._rows: Iterator[int] = iter(range(first, first + call.rows_per_prompt))

    def for_prompt(self, prompt_ids: Any, seed: int | None = None) -> SamplingParams:
        call, config = self._call, self._call.config
        process = row_process(call, next(self._rows))
        known = not any(map(looks_across_rows, call.processors))
        numbers = (
            as_numbers(process or (), len(prompt_ids)) if known and not isinstance(process, _OnPaddedRow) else None
        )
        penalties, warpers = numbers or (None, None)
        return SamplingParams(
            max_new_tokens=call.max_new_tokens,
            eos_token_ids=call.eos_token_ids,
            do_sample=bool(config.do_sample),
            seed=(self._seed() if seed is None else seed) if config.do_sample else 0,
            process=process,
            output_scores=call.wants("output_scores"),
            output_logits=call.wants("output_logits"),
            penalties=None if penalties == Penalties() else penalties,
            warpers=warpers,
            takes_drafts=known,
        )


def row_process(call: Call, row: int) -> LogitsProcessorList | _OnPaddedRow | None:
    """What the call's processors do to one row of its batch."""
    if not call.processors:
        return None
    padding = call.padding[row]
    found: list[Any] = []
    for processor in call.processors:
        if type(processor) in _BLIND or (not padding and call.num_rows == 1):
            found.append(processor)
            continue
        shifted = _SHIFTED.get(type(processor), _not_shifted)(processor, padding, row)
        if shifted is None:
            return _OnPaddedRow(_of_row(call.processors, row), call.input_ids[row : row + 1, :padding])
        found.append(shifted)
    return LogitsProcessorList(found)


class _OnPaddedRow:
    """Processors that are shown the row's padding too, as `generate` shows it."""

    def __init__(self, processors: LogitsProcessorList, padding: Tensor) -> None:
        self._processors = processors
        self._padding = padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = torch.cat([self._padding.to(input_ids.device), input_ids], dim=1)
        return self._processors(ids, scores)


def _of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    special = {RepetitionPenaltyLogitsProcessor: _penalty_of_row, PrefixConstrainedLogitsProcessor: _prefix_of_row}
    return LogitsProcessorList([special.get(type(p), lambda p, _: p)(p, row) for p in processors])


def _penalty_of_row(processor: Any, row: int) -> Any:
    ignored = processor.prompt_ignore_length
    if not isinstance(ignored, Tensor):
        return processor
    return RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=ignored[row : row + 1])


def _prefix_of_row(processor: Any, row: int) -> Any:
    allowed: Callable[[int, Tensor], list[int]] = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row // processor._num_beams, ids), 1)


# -------------------------------------------------------------------------------- the same on a row without its padding
# each takes a processor, how many tokens the row has lost, and its number; None where there is no such processor


def _not_shifted(processor: Any, padding: int, row: int) -> Any:
    return None if padding else processor


def _less(name: str) -> Callable[[Any, int, int], Any]:
    def shifted(processor: Any, padding: int, row: int) -> Any:
        own = copy.copy(processor)
        setattr(own, name, getattr(processor, name) - padding)
        return own

    return shifted


def _penalty(processor: Any, padding: int, row: int) -> Any:
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        return RepetitionPenaltyLogitsProcessor(processor.penalty) if int(ignored[row]) == padding else None
    return _not_shifted(processor, padding, row)


def _prefix(processor: Any, padding: int, row: int) -> Any:
    return None if padding else _prefix_of_row(processor, row)


_SHIFTED: dict[type, Callable[[Any, int, int], Any]] = {
    ExponentialDecayLengthPenalty: _less("regulation_start"),
    ForcedEOSTokenLogitsProcessor: _less("max_length"),
    MinLengthLogitsProcessor: _less("min_length"),
    MinNewTokensLengthLogitsProcessor: _less("prompt_length_to_skip"),
    PrefixConstrainedLogitsProcessor: _prefix,
    RepetitionPenaltyLogitsProcessor: _penalty,
    SuppressTokensAtBeginLogitsProcessor: _less("begin_index"),
}
