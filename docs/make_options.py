"""Writes docs/options.md from the code. usage: python docs/make_options.py   (a test says when)"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from transformers.generation.configuration_utils import ContinuousBatchingConfig

from hf_cb.config import CONVERTED, NEUTRAL, EngineConfig

PAGE = Path(__file__).with_name("options.md")


def batching_fate(name: str) -> str:
    if name in CONVERTED:
        return f"becomes `EngineConfig.{CONVERTED[name]}`"
    return "neutral: accepted, no answer depends on it" if name in NEUTRAL else "refused by name"


def described(cls: type) -> dict[str, str]:
    """The options in the class's own words, from the Args section of its docstring."""
    words = re.findall(r"^ {8}(\w+): (.+?)(?=^ {8}\w|^ {4}\S|\Z)", cls.__doc__ + "\n", re.M | re.S)
    return {name: " ".join(text.split()) for name, text in words}


def engine_rows() -> list[str]:
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    return [f"| `{name}` | `{defaults[name]!r}` | {text} |" for name, text in described(EngineConfig).items()]


def table(rows: dict[str, str]) -> list[str]:
    return ["| field | what becomes of it |", "|---|---|", *(f"| `{k}` | {v} |" for k, v in sorted(rows.items())), ""]


def page() -> str:
    batching_rows = {n: batching_fate(n) for n in ContinuousBatchingConfig.__dataclass_fields__}
    return "\n".join(
        [
            "# Options",
            "",
            "Made by `docs/make_options.py`; the newest supported transformers names the fields.",
            "",
            "What a request may ask for, field by field, is in [sampling.md](sampling.md).",
            "",
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
