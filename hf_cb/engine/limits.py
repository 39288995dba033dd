"""Whether a request can ever run: checked when it is submitted, with the numbers, since nothing may wait for ever."""

from __future__ import annotations

from hf_cb.core import Request
from hf_cb.engine.kv_cache import KVCache
from hf_cb.errors import PromptError
from hf_cb.sizes import ResolvedConfig


def check_ids(prompt_ids: list[int], vocab_size: int) -> None:
    """Raises PromptError for an empty prompt or an id that the embedding does not have."""
    if not prompt_ids:
        raise PromptError("The prompt is empty: give at least one token (for example the tokenizer's bos_token_id).")
    for edge in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= edge < vocab_size:
            raise PromptError(
                f"Token id {edge} at place {prompt_ids.index(edge)} of the prompt is not in the model's embedding "
                f"(0 to {vocab_size - 1}): was it made by another model's tokenizer?"
            )


def fit(request: Request, config: ResolvedConfig, kv: KVCache) -> int:
    """How many tokens this request may generate, at most what it asked for.

    Raises:
        PromptError: the prompt is longer than the model or the cache allows, or prompt and output never fit the cache.
    """
    prompt, asked = len(request.prompt_ids), request.params.max_new_tokens
    if prompt > config.max_model_len:
        raise PromptError(
            f"The prompt has {prompt} tokens and the model takes at most {config.max_model_len}: shorten it, or raise "
            f"max_model_len if the model can go beyond its positions."
        )
    allowed = min(asked, config.max_model_len - prompt + 1)  # the last token is never fed back
    step = config.max_batch_tokens
    needed = kv.blocks_for(prompt + max(1, allowed) - 1, step)
    if needed <= kv.pool.num_blocks:
        return allowed
    room = kv.longest_request(step, config.max_model_len)
    if prompt > room:
        raise PromptError(
            f"The prompt has {prompt} tokens and the KV cache holds {room} ({kv.pool.num_blocks} blocks of "
            f"{config.block_size}): shorten it, or give more kv_budget or num_blocks."
        )
    if request.params.length_is_given:
        raise PromptError(
            f"{prompt} prompt tokens and max_new_tokens={asked} need {needed} KV blocks of {config.block_size} tokens "
            f"and the cache has {kv.pool.num_blocks}: ask for at most {room - prompt + 1} new tokens, or give more "
            f"kv_budget or num_blocks."
        )
    return room - prompt + 1
