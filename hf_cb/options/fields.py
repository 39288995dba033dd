"""The fields of a GenerationConfig: honoured, without meaning here, or refused by name; and their values checked."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from hf_cb.errors import OptionError
from hf_cb.values import is_number, is_whole

# Mean what they mean in `generate`
HONOURED = frozenset(
    {"max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "eos_token_id"}
    | {"do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    | {"repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"}
    | {"bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"}
    | {"begin_suppress_tokens", "exponential_decay_length_penalty", "renormalize_logits", "remove_invalid_values"}
    | {"guidance_scale", "watermarking_config", "num_return_sequences", "output_scores", "output_logits"}
)

# Without meaning in continuous batching: accepted with any value, and no answer depends on them
NEUTRAL = frozenset(
    {"use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"}
    | {"continuous_batching_config", "prefill_chunk_size", "low_memory", "pad_token_id", "bos_token_id"}
    | {"decoder_start_token_id", "transformers_version", "early_stopping", "length_penalty", "is_assistant"}
    | {"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
    | {"assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size"}
    | {"return_dict_in_generate"}
)

_BEAMS = "there is no beam search: each sequence goes on by itself"
_DRAFTS = "drafts are the engine's choice and not a request's"
# Refused unless they have the value that switches them off; so is any field that is in none of the three lists
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "use_mtp": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "speculation_type": (),
    "token_healing": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}

WHY_REFUSED: dict[str, str] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids"), _BEAMS),
    "penalty_alpha": "contrastive search looks at hidden states of several continuations",
    "dola_layers": "it needs the hidden states of inner layers, and steps do not keep them",
    "use_mtp": "a model's own heads for several tokens are not driven",
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "speculation_type"), _DRAFTS),
    "token_healing": "it would change the prompt's ids",
    **dict.fromkeys(("output_attentions", "output_hidden_states"), "steps keep no such tensors"),
}


def eos_ids(given: Any) -> list[int] | None:
    """A list of ids, or None: -1 means none, and arrays and tensors are lists too."""
    if given is None:
        return None
    values = given.tolist() if hasattr(given, "tolist") else given
    values = values if isinstance(values, (list, tuple)) else [values]
    try:
        if any(isinstance(v, bool) for v in values):
            raise TypeError
        ids = [operator.index(v.item() if hasattr(v, "item") else v) for v in values]
    except TypeError:
        raise OptionError(f"eos_token_id must be a token id or a list of them, not {given!r}.") from None
    return [i for i in ids if i != -1] or None


_WHOLE_NUMBERS = (
    *("max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences", "top_k"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
)
_NUMBERS = (
    *("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_time"),
    *("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"),
)


def check_values(options: dict[str, Any]) -> None:
    """Raises OptionError for the values that people get wrong, before anything runs."""
    for name in _WHOLE_NUMBERS:
        value = options.get(name)
        if value is None:
            continue
        if not is_whole(value):
            raise OptionError(f"{name} must be a whole number, not {value!r}.")
        least = 1 if name in ("max_new_tokens", "max_length", "num_return_sequences") else 0
        if value < least:
            scores = " (0 with prompt_logprobs= scores a prompt)" if name == "max_new_tokens" else ""
            raise OptionError(f"{name} must be at least {least}, not {value}{scores}.")
    for name in _NUMBERS:
        value = options.get(name)
        if value is not None and not is_number(value):
            raise OptionError(f"{name} must be a number, not {value!r}.")
    if options.get("max_time") is not None and not options["max_time"] > 0:
        raise OptionError(f"max_time must be more than 0 seconds, not {options['max_time']!r}.")
    for name in ("do_sample", "renormalize_logits", "remove_invalid_values"):
        if options.get(name) not in (None, True, False):  # 1 and 0 are these, too
            raise OptionError(f"{name} must be True or False, not {options[name]!r}.")


def check_temperature(config: GenerationConfig) -> None:
    """Raises OptionError for a temperature that no probability can be divided by; greedy requests have none."""
    value = config.temperature
    if config.do_sample and value is not None and not value > 0:
        raise OptionError(
            f"temperature must be more than 0 where do_sample=True, not {value!r}: for the most likely tokens (what "
            f"temperature=0 means elsewhere), give do_sample=False."
        )


def check_least(config: GenerationConfig, given: Mapping[str, Any], scores_only: bool) -> None:
    """Raises OptionError for a least length above the greatest, where `generate` warns and stops at the greatest.

    So it is here where only some prompts are too short or too long for both, and where the least length is the model's
    own.

    Args:
        given: the caller's own options.
        scores_only: nothing is generated.
    """
    least, most = "min_new_tokens", "max_new_tokens"
    if config.min_new_tokens is None and config.max_new_tokens is None:
        least, most = "min_length", "max_length"
    low, high = getattr(config, least), 0 if scores_only else getattr(config, most)
    if given.get(least) and low and high is not None and low > high:
        raise OptionError(
            f"{least}={low} is more than {most}={high} allows: give a smaller {least} or a larger {most}."
        )


def _because(name: str) -> str:
    return f" ({WHY_REFUSED[name]})" if name in WHY_REFUSED else ""


def check_refused(config: GenerationConfig) -> None:
    for name in vars(GenerationConfig()):
        value = getattr(config, name, None)
        if name.startswith("_") or name in HONOURED or name in NEUTRAL or value is None:
            continue
        if value not in REFUSED.get(name, ()):
            raise OptionError(
                f"{name}={value!r} is not supported by hf_cb{_because(name)}: use model.generate for it, or leave it "
                f"unset."
            )


def check_tokens(config: GenerationConfig, vocab_size: int) -> None:
    """Raises OptionError for tokens that the model does not have, or that are none."""
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        for token in _as_list(getattr(config, name)):
            if not is_whole(token) or not 0 <= token < vocab_size:
                raise OptionError(
                    f"{name} has {token!r}, which is not a token id of this model (0 to {vocab_size - 1})."
                )
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        for token in _as_list(getattr(config, name)):  # which the model need not have, as in `generate`
            if not is_whole(token):
                raise OptionError(f"{name} must be a list of token ids, and it has {token!r}.")
    bias = config.sequence_bias
    biases = list(bias.items() if isinstance(bias, dict) else bias or ())
    words = {"bad_words_ids": config.bad_words_ids or (), "sequence_bias": [word for word, _ in biases]}
    for name, given in words.items():
        for word in given:
            for token in word if isinstance(word, (list, tuple)) else ():
                if isinstance(token, int) and token >= vocab_size:
                    raise OptionError(f"{name} has token {token}, and the model's end at {vocab_size - 1}.")
    if any(amount != amount for _, amount in biases):
        raise OptionError(f"sequence_bias must have numbers, not NaN: {bias!r}.")


def _as_list(given: Any) -> list[Any]:
    values = given.tolist() if hasattr(given, "tolist") else given
    return [] if values is None else list(values) if isinstance(values, (list, tuple)) else [values]
