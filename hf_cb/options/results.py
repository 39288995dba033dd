"""What a request is to be told besides its tokens: read from its options, and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from hf_cb.errors import OptionError
from hf_cb.values import flag, is_whole

MODES = ("processed_logprobs", "raw_logprobs")

# Beside GenerationConfig; `output_logits` and `output_scores` are fields of that
NAMES = ("logprobs", "prompt_logprobs", "logprobs_mode", "include_stop_str_in_output")


@dataclass(frozen=True)
class ResultOptions:
    """As in SamplingParams. `scores_only`: nothing is generated (`max_new_tokens=0`)."""

    logprobs: bool = False
    raw_logprobs: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_logits: bool = False
    output_scores: bool = False
    include_stop_str_in_output: bool = True
    scores_only: bool = False

    def params(self) -> dict[str, Any]:
        """The fields of SamplingParams."""
        names = ("logprobs", "raw_logprobs", "top_logprobs", "prompt_logprobs", "output_logits", "output_scores")
        return {name: getattr(self, name) for name in names}


def take_scores_only(options: dict[str, Any], prompt_logprobs: Any) -> bool:
    """Whether `max_new_tokens=0` asks for a prompt's log-probabilities alone; transformers knows no such length, so one
    token takes its place."""
    given = options.get("max_new_tokens")
    if given is None or isinstance(given, bool) or given != 0 or prompt_logprobs is None or prompt_logprobs is False:
        return False
    options["max_new_tokens"] = 1
    return True


def read(
    given: dict[str, Any], config: GenerationConfig, vocab_size: int, logprobs: bool, scores_only: bool
) -> ResultOptions:
    """The options among `given` by their NAMES, and the config's. `logprobs`: what holds where they do not say.

    Raises:
        OptionError: a value of the wrong type or out of bounds.
    """
    asked = _count("logprobs", given.get("logprobs"), vocab_size)
    if asked is None:
        asked = logprobs
    prompt = _count("prompt_logprobs", given.get("prompt_logprobs"), vocab_size)
    mode = given.get("logprobs_mode")
    if mode is not None and mode not in MODES:
        raise OptionError(f"logprobs_mode must be one of {', '.join(MODES)}, not {mode!r}.")
    logits, scores, include = config.output_logits, config.output_scores, given.get("include_stop_str_in_output")
    if scores_only and (config.num_return_sequences or 1) > 1:
        raise OptionError(
            f"max_new_tokens=0 generates nothing, so num_return_sequences={config.num_return_sequences} has no meaning "
            f"with it: leave it."
        )
    return ResultOptions(
        logprobs=asked is not False,
        raw_logprobs=mode == "raw_logprobs",
        top_logprobs=None if isinstance(asked, bool) else asked,
        prompt_logprobs=None if prompt is None or prompt is False else int(prompt) if prompt is not True else 0,
        output_logits=logits is not None and flag("output_logits", logits),
        output_scores=scores is not None and flag("output_scores", scores),
        include_stop_str_in_output=include is None or flag("include_stop_str_in_output", include),
        scores_only=scores_only,
    )


def _count(name: str, value: Any, vocab_size: int) -> int | bool | None:
    """True, False, a number of tokens, or None."""
    if value is None or isinstance(value, bool):
        return value
    if not is_whole(value):
        raise OptionError(f"{name} must be True, False or a number of alternatives, not {value!r}.")
    if not 0 <= (count := value.__index__()) <= vocab_size:
        raise OptionError(f"{name} must be between 0 and the {vocab_size} tokens of the vocabulary, not {count}.")
    return count
