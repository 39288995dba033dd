"""One request's logits processors: `generate`'s own list for its prompt, with ours and the caller's in their places."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkingConfig,
)

from hf_cb.errors import OptionError
from hf_cb.models.device import device_of
from hf_cb.models.sharding import tp_group
from hf_cb.options.fields import HONOURED
from hf_cb.penalties import Penalties
from hf_cb.warpers import TokenBiases

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Between two calls they remember something: keys and values of the negative prompt, contexts that were watermarked
_WITH_STATE = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
_CALLERS = ("logits_processor", "prefix_allowed_tokens_fn")
# of what a processor is made of
_REFUSALS = (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError)
_NEGATIVE = ("negative_prompt_ids", "negative_prompt_attention_mask")


def make_processors(
    model: PreTrainedModel,
    config: GenerationConfig,
    prompt_ids: Sequence[int],
    extras: dict[str, Any],
    penalties: Penalties | None = None,
) -> LogitsProcessorList:
    """What `generate` would apply to a prompt alone, in its order; then `penalties`, the caller's own processors, and
    last the warpers and what follows them. `config` is one of the request's own.

    Raises:
        OptionError: a processor does not take the option that it is made of.
    """
    device = device_of(model)
    own = [] if penalties is None else [TokenBiases(penalties, len(prompt_ids))]
    given = {name: extras.get(name) for name in ("prefix_allowed_tokens_fn", *_NEGATIVE)}
    given["logits_processor"] = LogitsProcessorList([*own, *(extras.get("logits_processor") or ())])
    config.num_return_sequences = 1  # the further ones are requests of their own
    if isinstance(config.watermarking_config, WatermarkingConfig):
        config.watermarking_config = _SharedTable(config.watermarking_config)
    model._prepare_special_tokens(config, True, device=device, batch_size=1)

    def build(config: GenerationConfig) -> LogitsProcessorList:
        return model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt_ids),
            encoder_input_ids=torch.tensor([list(prompt_ids)], device=device),
            device=device,
            model_kwargs={},
            **given,
        )

    try:
        return build(config)
    except _REFUSALS as error:
        name = _to_blame(build, config)
        value = "" if name is None else f"{name}={getattr(config, name)!r}: "
        raise OptionError(f"{value}{error}") from error


def _to_blame(build: Callable[[GenerationConfig], Any], config: GenerationConfig) -> str | None:
    """The option without which the others are fine."""
    for name in sorted(HONOURED - {"do_sample"}):
        without = copy.copy(config)
        setattr(without, name, None)
        try:
            build(without)
        except _REFUSALS:
            continue
        return name
    return None


def take_drafts(processors: Sequence[Any], extras: dict[str, Any]) -> bool:
    """Whether these may be asked about tokens that are only drafted. A caller's own may remember what they saw."""
    return not any(extras.get(name) for name in _CALLERS) and not any(isinstance(p, _WITH_STATE) for p in processors)


def check_extras(model: PreTrainedModel, config: GenerationConfig, extras: dict[str, Any], vocab_size: int) -> None:
    """Raises OptionError for wrong arguments of `generate`, by their names; makes tensors of the negative prompt."""
    for name in ("logits_processor", "stopping_criteria"):
        given = extras.get(name)
        if given is not None and not (isinstance(given, (list, tuple)) and all(callable(g) for g in given)):
            raise OptionError(f"{name} must be a list of callables, not {given!r}.")
    function = extras.get("prefix_allowed_tokens_fn")
    if function is not None and not callable(function):
        raise OptionError(f"prefix_allowed_tokens_fn must be callable, not {function!r}.")
    for name in _NEGATIVE:
        if extras.get(name) is not None:
            extras[name] = _one_row(name, extras[name]).to(device_of(model))
    ids, mask = (extras.get(name) for name in _NEGATIVE)
    if ids is not None and not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise OptionError(f"negative_prompt_ids has ids outside of the model's vocabulary (0 to {vocab_size - 1}).")
    if mask is not None and (ids is None or mask.shape != ids.shape):
        raise OptionError("negative_prompt_attention_mask needs negative_prompt_ids of the same length.")
    if config.exponential_decay_length_penalty is not None and not config.eos_token_id:
        raise OptionError("exponential_decay_length_penalty needs an eos_token_id, and this request has none.")
    if config.guidance_scale not in (None, 1) and tp_group(model) is not None:
        raise OptionError(
            f"guidance_scale={config.guidance_scale} runs the model beside its steps, which a tensor-parallel model "
            f"cannot do: leave it unset, or use a model in one process."
        )


def _one_row(name: str, given: Any) -> torch.Tensor:
    try:
        row = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"{name} must be token ids, not {given!r}.") from error
    row = row[None] if row.dim() == 1 else row
    if row.dim() != 2 or row.shape[0] != 1 or not row.shape[1] or row.is_floating_point():
        raise OptionError(
            f"{name} must be whole numbers [n] or [1, n], one row for all prompts of a call, not {tuple(row.shape)} "
            f"{row.dtype}: submit prompts with different ones one by one."
        )
    return row.long()


class _SharedTable:
    """A WatermarkingConfig whose processors share its table of random numbers: 8 MB, and many requests may have it."""

    def __init__(self, config: WatermarkingConfig) -> None:
        self._config = config

    def construct_processor(self, vocab_size: int, device: Any) -> Any:
        processor = copy.copy(_watermark(tuple(sorted(self._config.to_dict().items())), vocab_size, str(device)))
        processor.rng = torch.Generator(device=device)  # seeded for each token
        return processor


@functools.lru_cache(maxsize=4)
def _watermark(settings: tuple[tuple[str, Any], ...], vocab_size: int, device: str) -> Any:
    return WatermarkingConfig(**dict(settings)).construct_processor(vocab_size, device)
