"""What a GenerationConfig means for one request, by `generate`'s own merge and with `generate`'s own processors.

Unset fields come from the model's generation config and then from the defaults. Which options there are is in
`options`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from hf_cb.core import SamplingParams, StopCheck
from hf_cb.errors import OptionError, PromptError
from hf_cb.models.device import device_of
from hf_cb.options import results as result_options
from hf_cb.options.fields import check_least, check_refused, check_temperature, check_tokens, check_values, eos_ids
from hf_cb.options.own import OwnOptions
from hf_cb.options.processors import check_extras, make_processors, take_drafts
from hf_cb.options.results import ResultOptions
from hf_cb.penalties import Penalties
from hf_cb.text.media import TEXT_ONLY, media_inputs
from hf_cb.text.rendering import Rendering
from hf_cb.text.stop_strings import StopStrings
from hf_cb.values import is_whole
from hf_cb.warpers import as_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# `generate`'s arguments that are not in GenerationConfig
_PER_REQUEST = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "seed",
    *result_options.NAMES,
)


@dataclass
class Recipe:
    """Options merged and checked once; `for_prompt` makes one request's SamplingParams of them."""

    model: PreTrainedModel
    config: GenerationConfig
    extras: dict[str, Any] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None
    default_length: int = 0
    results: ResultOptions = field(default_factory=ResultOptions)
    stop_strings: StopStrings | None = None
    seed: int | None = None
    seeds: Iterator[int] | None = None  # for requests without a seed of their own
    own: OwnOptions = field(default_factory=OwnOptions)

    @property
    def num_return_sequences(self) -> int:
        return self.config.num_return_sequences or 1

    @property
    def rendering(self) -> Rendering | None:
        """How the answer becomes text; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        cut_at = None if self.results.include_stop_str_in_output else self.stop_strings
        return Rendering(self.tokenizer, cut_at, self.own.skip_special_tokens)

    def longest_output(self, prompt_length: int) -> int:
        """How many tokens a prompt of this length may get, before any limit of model or cache."""
        if self.config.max_new_tokens is not None:
            return self.config.max_new_tokens
        return (self.config.max_length or self.default_length + 1) - prompt_length

    def truncated(self, prompt_ids: list[int]) -> list[int]:
        """What `truncate_prompt_tokens` leaves of a prompt."""
        return self.own.truncated(prompt_ids, self.default_length - (self.config.max_new_tokens or 1))

    def for_prompt(self, prompt_ids: Sequence[int], seed: int | None = None) -> SamplingParams:
        """What a request for this prompt asks; `seed` for one of several sequences.

        Raises:
            PromptError: this prompt leaves nothing to generate.
        """
        config, length = copy.copy(self.config), len(prompt_ids)
        given = config.max_new_tokens is not None or config.max_length is not None
        config.max_new_tokens = self.longest_output(length)
        if config.max_new_tokens < 1 and config.max_length is not None:
            raise PromptError(
                f"The prompt has {length} tokens and max_length={config.max_length} leaves none to generate: raise "
                f"max_length, or give max_new_tokens instead."
            )
        config.max_length = length + config.max_new_tokens
        if config.min_new_tokens is not None:
            config.min_length = length + config.min_new_tokens
        if self.results.scores_only:
            return SamplingParams(max_new_tokens=0, max_time=config.max_time, **self.results.params())
        process = make_processors(self.model, config, prompt_ids, self.extras, self.own.penalties)
        custom = bool(self.extras.get("logits_processor"))  # a caller's processor may change later
        penalties, warpers = (None if custom else as_numbers(process, length)) or (None, None)
        return SamplingParams(
            max_new_tokens=max(1, config.max_new_tokens),
            length_is_given=given,
            eos_token_ids=frozenset(config.eos_token_id or ()),
            do_sample=bool(config.do_sample),
            seed=(self._seed() if seed is None else seed) if config.do_sample else 0,
            process=process or None,
            penalties=None if penalties == Penalties() else penalties,
            warpers=warpers,
            takes_drafts=take_drafts(process, self.extras),
            stop_checks=self._stop_checks(config),
            max_time=config.max_time,
            **self.results.params(),
        )

    def _seed(self) -> int:
        if self.seed is not None:
            return self.seed
        if self.seeds is not None:
            return next(self.seeds)
        return int(torch.randint(2**63 - 1, ()))  # so that set_seed() before a call repeats it

    def _stop_checks(self, config: GenerationConfig) -> tuple[StopCheck, ...]:
        config = copy.copy(config)
        config.max_length = config.max_time = config.stop_strings = None  # checked in other ways, as eos is
        config._eos_token_tensor = None
        custom = StoppingCriteriaList(self.extras.get("stopping_criteria") or [])
        criteria = self.model._get_stopping_criteria(config, custom, tokenizer=self.tokenizer)
        own = () if self.stop_strings is None else (self.stop_strings,)
        return (*own, *(_as_stop_check(c, device_of(self.model)) for c in criteria))


def make_recipe(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None,
    options: dict[str, Any],
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    default_length: int,
    logprobs: bool = False,
    seeds: Iterator[int] | None = None,
) -> Recipe:
    """Merges and checks the options of a request.

    Raises:
        OptionError: an option that is unknown, wrong or not supported, by its name.
    """
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise OptionError(f"generation_config must be a GenerationConfig, not {type(generation_config).__name__}.")
    options, vocab_size = dict(options), vocab_of(model)
    own = OwnOptions.take(options, vocab_size)
    extras = {name: options.pop(name) for name in _PER_REQUEST if name in options}
    known = vars(GenerationConfig())
    media = media_inputs(options)
    for name in options:
        if name in media:
            raise OptionError(f"{name}=: {TEXT_ONLY}.")
        if name not in known and name in inspect.signature(model.forward).parameters:
            raise OptionError(f"{name}= is an input of the model beside its text: use model.generate for it.")
        if name not in known:
            names = (*_PER_REQUEST, *OwnOptions.__dataclass_fields__)
            raise OptionError(f"Unknown option {name!r}: it is neither in GenerationConfig nor one of {names}.")
    scores_only = result_options.take_scores_only(options, extras.get("prompt_logprobs"))
    check_values(options)
    own_seed = extras.pop("seed", None)
    if own_seed is not None and not is_whole(own_seed):
        raise OptionError(f"seed must be a whole number or None, not {own_seed!r}.")
    config = _merge(model, generation_config, options)
    check_refused(config)
    check_temperature(config)
    check_least(config, {**({} if generation_config is None else vars(generation_config)), **options}, scores_only)
    stop_strings = None
    if config.stop_strings is not None:
        if tokenizer is None:
            raise OptionError(f"stop_strings={config.stop_strings!r} needs a tokenizer: pass tokenizer=.")
        stop_strings = StopStrings(tokenizer, config.stop_strings)
    config.eos_token_id = None if own.ignore_eos else eos_ids(config.eos_token_id)
    check_extras(model, config, extras, vocab_size)
    make_processors(model, copy.copy(config), [0], extras)  # to find what it refuses before anything runs
    check_tokens(config, vocab_size)
    results = result_options.read(extras, config, vocab_size, logprobs, scores_only)
    return Recipe(model, config, extras, tokenizer, default_length, results, stop_strings, own_seed, seeds, own)


def vocab_of(model: PreTrainedModel) -> int:
    """How many tokens the model has a score for."""
    head = model.get_output_embeddings()
    return (head if head is not None else model.get_input_embeddings()).weight.shape[0]


def _merge(model: PreTrainedModel, config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
    """By `generate`'s own rules, except for its built-in length of 20 tokens: that is not anybody's wish."""
    where_set = (options.get("max_length"), getattr(config, "max_length", None), model.generation_config.max_length)
    length_is_set = any(v is not None for v in where_set)
    # the config and separate options together are fine here, and transformers would warn about it
    given = copy.deepcopy(config) if config is not None else GenerationConfig()
    try:
        given.update(**options)
        check_values({k: v for k, v in vars(given).items() if v is not None})
        merged, _ = model._prepare_generation_config(given)
    except OptionError:
        raise
    except (ValueError, TypeError, AttributeError) as error:  # wrong types, and options that do not go together
        raise OptionError(f"{_not_taken(options)}{error}") from error
    if not length_is_set:
        merged.max_length = None
    return merged


def _not_taken(options: dict[str, Any]) -> str:
    """Names the option, if it is a single one, that transformers does not take."""
    for name, value in options.items():
        try:
            GenerationConfig().update(**{name: value})
        except (ValueError, TypeError, AttributeError):
            return f"{name}={value!r}: "
    return ""


def _as_stop_check(criteria: Callable[..., Any], device: torch.device) -> StopCheck:
    def check(token_ids: Sequence[int]) -> bool:
        done = criteria(torch.tensor([token_ids], device=device), None)
        return bool(done.all()) if isinstance(done, torch.Tensor) else bool(done)

    return check


def missing(model_class: type) -> list[str]:
    """What hf_cb calls on a model's class, or puts its own in the place of, and the installed transformers lacks."""
    names = {
        "_prepare_generation_config": ("generation_config",),
        "_prepare_special_tokens": ("generation_config", "device", "batch_size"),
        "_get_logits_processor": ("generation_config", "input_ids_seq_length", "logits_processor"),
        "_get_stopping_criteria": ("generation_config", "tokenizer"),
        "_supports_logits_to_keep": (),
        "_sample": (
            "input_ids",
            "logits_processor",
            "stopping_criteria",
            "generation_config",
            "synced_gpus",
            "streamer",
        ),
        "_beam_search": (),
        "_assisted_decoding": (),
        "_prepare_position_ids_for_generation": ("inputs_tensor", "model_kwargs"),
    }
    gone = []
    for name, parameters in names.items():
        method = getattr(model_class, name, None)
        if method is None or not set(parameters) <= set(inspect.signature(method).parameters):
            gone.append(f"{model_class.__name__}.{name}({', '.join(parameters)})")
    return gone
