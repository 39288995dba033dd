"""From the fields of a request to the options of `manager.submit`: the one place where the two meet.

What a request leaves open is as the model's generation config says, and what that leaves open is as OpenAI's API
says: sampling at temperature 1 from all tokens. (`generate` alone would be greedy, and look at the best 50.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_cb.serving.errors import bad
from hf_cb.serving.protocol import GenerationRequest

if TYPE_CHECKING:
    from transformers import GenerationConfig

GREEDY_BELOW = 1e-5  # a temperature so low is greedy, as in vLLM

# OpenAI's and vLLM's names -> ours, where the value is the same
_SAME = {
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "skip_special_tokens": "skip_special_tokens",
    "stop": "stop_strings",
    "priority": "priority",
}


def submit_options(request: GenerationRequest, model_config: GenerationConfig) -> dict[str, Any]:
    """Keyword arguments for `manager.submit`, but for the prompt's and the server's own."""
    fields = request.fields
    options = {ours: fields[name] for name, ours in _SAME.items() if name in fields}
    options |= _sampling(fields, model_config) | _ending(fields, model_config) | _logprobs(request)
    if request.max_tokens is not None:
        options["max_new_tokens"] = request.max_tokens
    if request.n > 1:
        options["num_return_sequences"] = request.n
    if "seed" in fields:
        options["seed"] = fields["seed"] % 2**63
    if request.user is not None:
        options["user"] = request.user
    return options


def _sampling(fields: dict[str, Any], config: GenerationConfig) -> dict[str, Any]:
    temperature = fields.get("temperature")
    samples = any(name in fields for name in ("top_p", "top_k", "min_p", "n"))  # these say so without it
    if temperature is None and config.do_sample is False and not samples:
        return {"do_sample": False}
    if temperature is None:
        temperature = 1.0 if config.temperature is None else config.temperature
    if temperature < GREEDY_BELOW:
        if fields.get("n", 1) > 1:
            raise bad("n", "must be 1 at temperature 0, where all answers are the same.")
        return {"do_sample": False}
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature}
    for name, everything in (("top_p", 1.0), ("top_k", 0)):
        own = getattr(config, name)
        options[name] = fields.get(name, everything if own is None else own)
    options["top_k"] = max(0, options["top_k"])
    if "min_p" in fields:
        options["min_p"] = fields["min_p"]
    return options


def _ending(fields: dict[str, Any], config: GenerationConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "stop" in fields:
        options["include_stop_str_in_output"] = fields.get("include_stop_str_in_output", False)
    more = fields.get("stop_token_ids")
    if more:
        own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        given = [] if fields.get("ignore_eos") else [i for i in own if i is not None]
        options["eos_token_id"] = [*given, *more]
    elif "ignore_eos" in fields:
        options["ignore_eos"] = fields["ignore_eos"]
    return options


def _logprobs(request: GenerationRequest) -> dict[str, Any]:
    """The model's own, before temperature and penalties, as OpenAI and vLLM give them."""
    options: dict[str, Any] = {}
    if request.top_logprobs is not None:
        options["logprobs"] = request.top_logprobs or True
    of_prompt = request.fields.get("prompt_logprobs")
    if request.echo and (request.top_logprobs is not None or request.max_tokens == 0):
        of_prompt = max(of_prompt or 0, request.top_logprobs or 0)
    if of_prompt is not None:
        options["prompt_logprobs"] = of_prompt or True
    if options:
        options["logprobs_mode"] = "raw_logprobs"
    return options
