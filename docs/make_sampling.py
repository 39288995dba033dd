"""Writes docs/sampling.md from the code and the examples. usage: python docs/make_sampling.py   (a test says when)"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))

import sampling_examples as examples
from make_options import described

from hf_cb.core import SamplingParams
from hf_cb.options import fields as options
from hf_cb.options.own import OwnOptions
from hf_cb.options.recipe import make_recipe

PAGE = Path(__file__).with_name("sampling.md")
PROMPT = [5, 6, 7, 8, 5, 6]


def model() -> PreTrainedModel:
    """Small; nothing of it runs."""
    sizes = dict(vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    return LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=2))


def params_of(model: PreTrainedModel, given: dict[str, Any]) -> SamplingParams:
    needs_tokenizer = "stop_strings" in given
    base: dict[str, Any] = dict(do_sample=True, top_k=0, max_new_tokens=9)
    given = {k: v for k, v in (base | given).items() if not (needs_tokenizer and k == "stop_strings")}
    return make_recipe(model, None, given, tokenizer=None, default_length=64).for_prompt(PROMPT)


def way_of(model: PreTrainedModel, given: dict[str, Any]) -> str:
    """How an example runs, as a request for it is made."""
    plain, params = params_of(model, dict(do_sample="do_sample" not in given)), params_of(model, given)
    if params.warpers is None:
        return "per row"
    drawn_with = [(p.do_sample, p.penalties, p.warpers) for p in (plain, params)]
    if drawn_with[0] != drawn_with[1]:
        return "batched"
    return "by the engine"


def shown(given: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, list) and value and callable(value[0]):
            return f"[{', '.join(type(v).__name__ + '()' for v in value)}]"
        if callable(value):
            return getattr(value, "__name__", type(value).__name__)
        if not isinstance(value, (int, float, str, list, dict, tuple, type(None))):
            return f"{type(value).__name__}(...)"
        long = isinstance(value, list) and len(value) > 8
        return f"[{', '.join(map(repr, value[:3]))}, ...]" if long else repr(value)

    return "`" + ", ".join(f"{name}={text(value)}" for name, value in given.items()) + "`"


def honoured(model: PreTrainedModel, given: dict[str, dict[str, Any]]) -> list[str]:
    rows = (f"| `{name}` | {way_of(model, example)} | {shown(example)} |" for name, example in sorted(given.items()))
    return ["| option | how it runs | example |", "|---|---|---|", *rows, ""]


def others() -> list[str]:
    rows = {}
    for name in vars(GenerationConfig()):
        if name in options.NEUTRAL:
            rows[name] = "neutral: accepted, no answer depends on it"
        elif name not in options.HONOURED and not name.startswith("_"):
            off = " or ".join(map(repr, options.REFUSED[name]))
            rows[name] = f"refused{', unless it is ' + off if off else ''}: {options.WHY_REFUSED[name]}"
    return ["| field | what becomes of it |", "|---|---|", *(f"| `{k}` | {v} |" for k, v in sorted(rows.items())), ""]


def meanings() -> list[str]:
    """Our own options in the class's words."""
    words = described(OwnOptions)
    return ["| option | meaning |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in words.items()), ""]


INTRODUCTION = """\
# Sampling and stopping

Made by `docs/make_sampling.py`; the newest supported transformers names the fields. The examples are those of
`docs/sampling_examples.py`, and tests run each of them: alone, and in a batch in which all requests have other
options.

Every request has options of its own, with the meaning and in the order that they have in `generate`: one
`GenerationConfig` for all prompts or one for each, and single options as keyword arguments. Unset fields come from
the model's generation config and then from `generate`'s defaults, except for its length of 20: without
`max_new_tokens` and `max_length` an answer may be as long as the model and the KV cache allow. `eos_token_id=-1`
means none. A `min_new_tokens` above `max_new_tokens` is refused, where `generate` warns and stops at the latter.

**How it runs.** *Batched*: for all requests in one call, native on a CPU and on the device on a GPU; a step's work is
that of the tokens concerned. *Per row*: transformers' own class, on that request's row of scores and its ids `[1,
n]`; one such option takes the whole request that way, and nobody else's. *By the engine*: no score depends on it. A
greedy request with nothing else takes the largest logit.

**Order.** transformers' own processors in `generate`'s order (guidance, sequence bias, penalties, banned n-grams and
words, lengths, forced tokens, suppressed ones); then one number is added to each token's score, `logit_bias -
frequency_penalty * count - presence_penalty * (count > 0)`, with the counts of the output alone, as OpenAI defines
it; then the caller's `logits_processor`; then temperature and the filters (so penalties come before temperature, as
in vLLM); then watermark and renormalisation.

**Seeds.** A token depends on its scores, the request's `seed` and its position, and on nothing else: the same
whatever the batch, chunking, preemption, drafts or streaming (float32). Of `num_return_sequences` each has a seed
made from the request's; the first has that itself, and all share the prompt's keys and values. Prompts of one call
with `seed=` all have that seed. Without one, each request draws its own from torch's global generator in the caller's
thread, so `set_seed()` before a call repeats it.

**State.** A `LogitsProcessor`, `StoppingCriteria` or `prefix_allowed_tokens_fn` is called for one request at a time,
in the order of its tokens, once for each (also when a request gives way and is computed anew), and never for tokens
that are only drafted: such requests take no drafts, nor do those with guidance or SynthID watermarks, which have
state. One object that is given to several requests of a batch, or with `num_return_sequences`, sees their calls
mixed: if it remembers anything, give each request one of its own. It runs in the engine's thread: others wait for it.
An exception in it ends its own request. Guidance runs the model once more for each token, on the negative prompt with
a cache of its own.
"""


def page() -> str:
    torch.manual_seed(0)
    small = model()
    parts = [
        INTRODUCTION,
        "## GenerationConfig",
        "",
        *honoured(small, examples.CONFIG),
        "Not in every answer:",
        "",
        *others(),
        "## Arguments of generate",
        "",
        *honoured(small, examples.ARGUMENTS),
        "## Our own options",
        "",
        *meanings(),
        *honoured(small, examples.OWN),
        "What is told besides tokens, `logprobs` and its like, and where text ends: [results.md](results.md).",
        "",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
