"""Invariant 2: bfloat16 on the trained model, against the float32 model on the same prefixes."""

from __future__ import annotations

import pytest
import torch
from tiny_models import greedy

import hf_cb
from hf_cb.bench.workload import mixed

NEW_TOKENS = 48


@pytest.mark.real_model
@pytest.mark.slow
def test_greedy_tokens_are_nearly_always_the_float32_models() -> None:
    model, tokenizer = hf_cb.demo_model(dtype=torch.bfloat16)
    prompts = [r.prompt[:200] for r in mixed(tokenizer, n=12).requests]
    hf_cb.accelerate(model, tokenizer)
    answers = [r.generated_tokens for r in model.generate_batch(prompts, greedy(NEW_TOKENS)).values()]
    hf_cb.restore(model)
    exact, _ = hf_cb.demo_model(dtype=torch.float32)
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        gaps.append(logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0])
    gap = torch.cat(gaps)
    assert len(gap) == 12 * NEW_TOKENS
    assert (gap == 0).float().mean() >= 0.98, f"{(gap > 0).sum()} of {len(gap)} tokens are not the argmax"
    assert gap.max() <= 0.5, f"a token is {gap.max():.2f} below the best one"
