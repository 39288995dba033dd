"""Drawing tokens where the logits are: all rows of a step in one kernel, each by its own settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_cb.attention.triton import device_problem, package_problem
from hf_cb.kernels.device import sent
from hf_cb.steps import Draw, Drawn


class Settings(NamedTuple):
    """`steps.Draw` for each of S rows, and the position that its token will have: `[S]` on the logits' device; the
    first three float32, `top_ks` int32, the others int64."""

    temperatures: Tensor
    top_ps: Tensor
    min_ps: Tensor
    top_ks: Tensor
    seeds: Tensor
    positions: Tensor


DrawTokens = Callable[[Tensor, Settings], Drawn]  # from logits `[S, V]`


def settings_for(rows: Sequence[Draw], positions: Sequence[int], device: torch.device) -> Settings:
    floats = torch.tensor([[row.temperature, row.top_p, row.min_p] for row in rows]).T.contiguous()
    longs = torch.tensor([[row.top_k, row.seed, at] for row, at in zip(rows, positions, strict=True)]).T.contiguous()
    temperatures, top_ps, min_ps = sent(floats, device)
    top_ks, seeds, places = sent(longs, device)
    return Settings(temperatures, top_ps, min_ps, top_ks.int(), seeds, places)


def draw_for(device: torch.device) -> DrawTokens | None:
    """What draws on a device of that kind; None where rows have to be sampled one by one."""
    return None if device.type == "cpu" or package_problem() or device_problem(device) else draw_by_kernel


def draw_by_kernel(logits: Tensor, settings: Settings) -> Drawn:
    """See `kernels.triton.sampling.sample`."""
    from hf_cb.kernels.triton import sampling

    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    tokens = sampling.sample(
        logits,
        temperature=settings.temperatures,
        top_k=settings.top_ks,
        top_p=settings.top_ps,
        min_p=settings.min_ps,
        seeds=settings.seeds,
        positions=settings.positions,
        logprobs_out=logprobs,
    )
    return Drawn(tokens, logprobs)
