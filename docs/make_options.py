"""Writes docs/options.md from the code. usage: python docs/make_options.py   (a test says when)"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_cb.config import CONVERTED, NEUTRAL, EngineConfig
from hf_cb.models import options

PAGE = Path(__file__).with_name("options.md")


def generation_fate(name: str) -> str:
    if name in options.HONOURED:
        return "honoured, per request"
    if name in options.NEUTRAL:
        return "neutral: accepted, no answer depends on it"
    off = [repr(v) for v in options.REFUSED.get(name, ())]
    return f"refused by name{', unless it is ' + ' or '.join(off) if off else ''}"


def batching_fate(name: str) -> str:
    if name in CONVERTED:
        return f"becomes `EngineConfig.{CONVERTED[name]}`"
    return "neutral: accepted, no answer depends on it" if name in NEUTRAL else "refused by name"


def engine_rows() -> list[str]:
    """The options in the class's own words, from the Args section of its docstring."""
    words = re.findall(r"^ {8}(\w+): (.+?)(?=^ {8}\w|^ {4}\S|\Z)", EngineConfig.__doc__ + "\n", re.M | re.S)
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    return [f"| `{name}` | `{defaults[name]!r}` | {' '.join(text.split())} |" for name, text in words]


def table(rows: dict[str, str]) -> list[str]:
    return ["| field | what becomes of it |", "|---|---|", *(f"| `{k}` | {v} |" for k, v in sorted(rows.items())), ""]


def page() -> str:
    generation_rows = {n: generation_fate(n) for n in vars(GenerationConfig()) if not n.startswith("_")}
    batching_rows = {n: batching_fate(n) for n in ContinuousBatchingConfig.__dataclass_fields__}
    return "\n".join(
        [
            "# Options",
            "",
            "Made by `docs/make_options.py`; the newest supported transformers names the fields.",
            "",
            "## GenerationConfig",
            "",
            "One config for all prompts, or one for each; single options as keyword arguments. Unset fields come from "
            "the model's generation config and then from `generate`'s defaults, except for its length of 20: without "
            "`max_new_tokens` and `max_length` an answer may be as long as the model and the KV cache allow. "
            "`eos_token_id=-1` means none. Besides these: `seed`, `logits_processor`, `stopping_criteria`, "
            "`prefix_allowed_tokens_fn`, `negative_prompt_ids`, `negative_prompt_attention_mask`; and what is told "
            "[besides tokens](results.md): `logprobs`, `prompt_logprobs`, `logprobs_mode`, "
            "`include_stop_str_in_output`.",
            "",
            "Greedy requests without a processor share one argmax; temperature, top_k, top_p and min_p run for all "
            "requests in one call where there are kernels for it. All others run transformers' own processors on "
            "their own row and ids, one request at a time.",
            "",
            *table(generation_rows),
            "## ContinuousBatchingConfig",
            "",
            'Accepted wherever an `hf_cb.EngineConfig` is. A field that equals transformers\' default means "auto".',
            "",
            *table(batching_rows),
            "## EngineConfig",
            "",
            "For `hf_cb.patch(...)`, `hf_cb.accelerate(model, ...)` and, as an object, wherever a "
            'ContinuousBatchingConfig is accepted. None means "auto": `hf_cb.explain(model)` says what it becomes.',
            "",
            "| option | default | meaning |",
            "|---|---|---|",
            *engine_rows(),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
