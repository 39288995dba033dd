"""One example of each option that hf_cb honours: docs/sampling.md shows them, and tests/sampling runs them.

They are for a model with 128 tokens and prompts of about a dozen; each is chosen so that it changes an answer.
"""

from __future__ import annotations

from typing import Any

from transformers import LogitsProcessor, StoppingCriteria, WatermarkingConfig


class EvenTokens(LogitsProcessor):
    """A caller's own processor."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        assert input_ids.shape[0] == 1 and scores.shape[0] == 1, "its own request and no other"
        scores = scores.clone()
        scores[:, 1::2] = float("-inf")
        return scores


class LengthIsTwentieth(StoppingCriteria):
    """A caller's own stopping criterion."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        assert input_ids.shape[0] == 1, "its own request and no other"
        return input_ids.new_tensor([input_ids.shape[1] % 20 == 0]).bool()


def near_the_last(batch_id: int, input_ids: Any) -> list[int]:
    """A caller's own function of what may come next."""
    assert batch_id == 0 and input_ids.dim() == 1, "its own request and no other"
    return [(int(input_ids[-1]) + i) % 128 for i in range(20)]


ENDS = list(range(3, 128, 5))  # so many tokens that one of them comes soon

# By the field of GenerationConfig
CONFIG: dict[str, dict[str, Any]] = {
    "begin_suppress_tokens": dict(begin_suppress_tokens=list(range(0, 128, 2))),
    "bad_words_ids": dict(bad_words_ids=[[i] for i in range(0, 128, 3)]),
    "do_sample": dict(do_sample=True),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=1),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=4.0),
    "eos_token_id": dict(eos_token_id=ENDS),
    "epsilon_cutoff": dict(epsilon_cutoff=0.02),
    "eta_cutoff": dict(eta_cutoff=0.05),
    "exponential_decay_length_penalty": dict(exponential_decay_length_penalty=(3, 3.0), eos_token_id=[5, 9, 40]),
    "forced_bos_token_id": dict(forced_bos_token_id=11),
    "forced_eos_token_id": dict(forced_eos_token_id=13),
    "guidance_scale": dict(guidance_scale=3.0),
    "max_length": dict(max_length=18, max_new_tokens=None),
    "max_new_tokens": dict(max_new_tokens=7),
    "max_time": dict(max_time=300.0),
    "min_length": dict(min_length=17, eos_token_id=ENDS),
    "min_new_tokens": dict(min_new_tokens=5, eos_token_id=ENDS),
    "min_p": dict(min_p=0.2),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "num_return_sequences": dict(num_return_sequences=2),
    "output_logits": dict(output_logits=True),
    "output_scores": dict(output_scores=True),
    "remove_invalid_values": dict(remove_invalid_values=True),
    "renormalize_logits": dict(renormalize_logits=True),
    "repetition_penalty": dict(repetition_penalty=2.5),
    "sequence_bias": dict(sequence_bias=[[[7], 9.0], [[20, 21], -4.0]]),
    "stop_strings": dict(stop_strings=["a", "e", "i", "o", "1", "2", "B"]),
    "suppress_tokens": dict(suppress_tokens=list(range(0, 100, 2))),
    "temperature": dict(temperature=1.7),
    "top_h": dict(top_h=0.4),
    "top_k": dict(top_k=3),
    "top_p": dict(top_p=0.6),
    "typical_p": dict(typical_p=0.5),
    "watermarking_config": dict(watermarking_config=WatermarkingConfig(bias=6.0)),
}

# By the argument of `generate` that is not in GenerationConfig
ARGUMENTS: dict[str, dict[str, Any]] = {
    "logits_processor": dict(logits_processor=[EvenTokens()]),
    "negative_prompt_attention_mask": dict(
        guidance_scale=3.0, negative_prompt_ids=[[3, 4, 5, 6]], negative_prompt_attention_mask=[[0, 1, 1, 1]]
    ),
    "negative_prompt_ids": dict(guidance_scale=3.0, negative_prompt_ids=[[30, 31, 32]]),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=near_the_last),
    "stopping_criteria": dict(stopping_criteria=[LengthIsTwentieth()]),
}

# By hf_cb's own option
OWN: dict[str, dict[str, Any]] = {
    "frequency_penalty": dict(frequency_penalty=2.0),
    "ignore_eos": dict(ignore_eos=True, eos_token_id=ENDS),
    "logit_bias": dict(logit_bias={"7": 9.0, 20: -100}),
    "presence_penalty": dict(presence_penalty=4.0),
    "seed": dict(seed=7),
    "skip_special_tokens": dict(skip_special_tokens=False),
    "truncate_prompt_tokens": dict(truncate_prompt_tokens=5),
}

ALL = CONFIG | ARGUMENTS | OWN
