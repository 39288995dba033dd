"""What tests of routed `generate` share: a padded batch, a plain twin, and which way a call went."""

from __future__ import annotations

import logging
from typing import Any

import torch
from tiny_models import make_prompts
from torch import Tensor

PROMPTS = make_prompts([5, 12, 3, 9])
EOS = [2, 5, 9, 20, 30, 41, 77, 100]  # so many that rows end at different places


def padded(prompts: list[list[int]] = PROMPTS, side: str = "left", pad: int = 0) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), width), pad), torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        at = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, at], mask[row, at] = torch.tensor(prompt), 1
    return {"input_ids": ids, "attention_mask": mask}


class Ways:
    """Why calls were left to the original loop, one reason each; empty after calls that the engine answered."""

    def __init__(self, caplog: Any) -> None:
        caplog.set_level(logging.DEBUG, "hf_cb")
        self._caplog = caplog

    def take(self) -> list[str]:
        found = [r.getMessage() for r in self._caplog.records if r.name == "hf_cb"]
        self._caplog.clear()
        return [text.split("own loop: ")[1] for text in found if "own loop: " in text]


def same(got: Any, want: Any) -> bool:
    got, want = (getattr(x, "sequences", x) for x in (got, want))
    return got.dtype == want.dtype and torch.equal(got, want)
