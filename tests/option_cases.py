"""The documented example of each option as a request, the same for `generate`, and ways to run many of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sampling_examples as examples
import torch
from tiny_models import greedy, make_prompts, make_tokenizer
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_cb import EngineConfig, GenerationOutput
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.sampler import Sampler, pick
from hf_cb.models.drawing import Settings
from hf_cb.seeds import uniform
from hf_cb.steps import Drawn

PROMPT = [9, 20, 41, 9, 20, 77, 30, 41, 9, 20, 63, 9]  # with n-grams that come again
TOKENIZER = make_tokenizer()
WAYS = ("native", "rows", "overlap", "device")


def prompt_of(name: str) -> list[int]:
    return [9] if name == "forced_bos_token_id" else PROMPT  # that is for prompts of one token


def options_of(name: str, do_sample: bool) -> dict[str, Any]:
    """What a request for an example is given: a length, no end, and a seed if it has none."""
    base = dict(max_new_tokens=10, do_sample=do_sample, eos_token_id=-1, seed=11)
    always = name in ("do_sample", "num_return_sequences")  # several sequences make no sense greedily
    return base | examples.ALL[name] | dict(do_sample=do_sample or always)


class Penalised:
    """OpenAI's formula, over the whole vocabulary."""

    def __init__(self, length: int, bias: dict[Any, float], frequency: float, presence: float) -> None:
        self.length, self.bias, self.frequency, self.presence = length, bias, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.length :], minlength=scores.shape[1])
        scores = scores - counts * self.frequency - (counts > 0) * self.presence
        for token, amount in self.bias.items():
            scores[0, int(token)] += amount
        return scores


def for_generate(prompt: list[int], given: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """A prompt and options for `generate` that mean the same; ours are said in other words."""
    options = dict(given)
    options.pop("seed", None)
    options.pop("skip_special_tokens", None)
    prompt = prompt[-options.pop("truncate_prompt_tokens", len(prompt)) :]
    if options.pop("ignore_eos", False):
        options["eos_token_id"] = -1
    own = [options.pop(n, d) for n, d in (("logit_bias", {}), ("frequency_penalty", 0.0), ("presence_penalty", 0.0))]
    processors = [Penalised(len(prompt), *own)] if any(own) else []
    processors += options.pop("logits_processor", [])
    if processors:
        options["logits_processor"] = LogitsProcessorList(processors)
    if "stopping_criteria" in options:
        options["stopping_criteria"] = StoppingCriteriaList(options["stopping_criteria"])
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        if name in options:
            options[name] = torch.tensor(options[name])
    if "stop_strings" in options:
        options["tokenizer"] = TOKENIZER
    return prompt, options


def generated(model: PreTrainedModel, prompt: list[int], given: dict[str, Any], **more: Any) -> Any:
    """What `generate` returns for this request alone."""
    prompt, options = for_generate(prompt, given)
    arguments = {
        n: options.pop(n)
        for n in ("logits_processor", "stopping_criteria", "tokenizer", "prefix_allowed_tokens_fn")
        + ("negative_prompt_ids", "negative_prompt_attention_mask")
        if n in options
    }
    ids = torch.tensor([prompt])
    config = greedy(**options)
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **arguments, **more)


def generated_tokens(model: PreTrainedModel, prompt: list[int], given: dict[str, Any]) -> list[int]:
    cut = len(for_generate(prompt, given)[0])
    return generated(model, prompt, given)[0, cut:].tolist()


def draw_in_torch(logits: torch.Tensor, settings: Settings) -> Drawn:
    """What a device draws with, here with the random numbers of a CPU: so its tokens are known."""
    tokens, logprobs = [], []
    for row, temperature, p, m, k, seed, place in zip(logits.float(), *(s.tolist() for s in settings), strict=True):
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature else [])
        warpers += [TopKLogitsWarper(k)] if k else []
        warpers += [TopPLogitsWarper(p)] if p < 1 else []
        warpers += [MinPLogitsWarper(m)] if m else []
        scores = warpers(torch.zeros(1, 1, dtype=torch.long), row[None])[0]
        tokens.append(pick(scores, uniform(seed, place)) if temperature else int(scores.argmax()))
        logprobs.append(float(scores.log_softmax(-1)[tokens[-1]]))
    return Drawn(torch.tensor(tokens), torch.tensor(logprobs))


SAMPLERS = {
    "native": Sampler,
    "rows": lambda: Sampler(native=False),
    "overlap": Sampler,
    "device": lambda: DeviceSampler(draw_in_torch),
}


@contextmanager
def manager_of(model: PreTrainedModel, way: str, **options: Any) -> Iterator[Any]:
    """A manager that samples in this way, with little room, so that requests are cut into chunks and give way."""
    sizes: dict[str, Any] = dict(block_size=4, max_batch_tokens=24, max_num_seqs=24, num_blocks=40) | options
    config = EngineConfig(**sizes, overlap=way in ("overlap", "device"))
    with model.continuous_batching_context_manager(continuous_batching_config=config, tokenizer=TOKENIZER) as manager:
        manager.engine.sampler = SAMPLERS[way]()
        yield manager


def told(outputs: list[GenerationOutput]) -> list[tuple[Any, ...]]:
    """What must not depend on anybody else."""
    return [(o.generated_tokens, o.text, o.finish_reason, o.error) for o in outputs]


def other_prompts(count: int, seed: int) -> list[list[int]]:
    return make_prompts([3 + (7 * i) % 17 for i in range(count)], seed)
