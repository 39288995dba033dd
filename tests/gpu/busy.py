"""How much of the time a device is at work while requests decode, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import hf_cb
from hf_cb import EngineConfig

MIDDLE = (0.3, 0.9)  # of the time of a run: its prompts come before, and requests that end one by one after


def share(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Of the time from `begin` to `end`, what lies in at least one interval."""
    covered, upto = 0.0, begin
    for start, stop in sorted(intervals):
        start, stop = max(start, upto), min(stop, end)
        if stop > start:
            covered, upto = covered + stop - start, stop
    return covered / (end - begin)


def _middle(work: Sequence[tuple[float, float]]) -> tuple[float, float]:
    first, last = min(start for start, _ in work), max(stop for _, stop in work)
    return first + MIDDLE[0] * (last - first), first + MIDDLE[1] * (last - first)


def while_decoding(
    model: Any, device: str, counts: Sequence[int], prompt: int, new: int, **options: Any
) -> list[dict[str, Any]]:
    """For each of `counts`, the share of busy time, and the mean time of a step, with that many requests of one length
    that decode together.

    Everything is recorded and compiled before it is measured. Kernels, copies and fills count as work; where the
    profiler sees nothing of the device, it is None. On a CPU it sees this thread alone, which only waits.
    """
    vocab, most = model.config.get_text_config().vocab_size, max(counts)
    prompts = torch.randint(vocab, (most, prompt), generator=torch.Generator().manual_seed(0)).tolist()
    hf_cb.accelerate(model)
    config = EngineConfig(prefix_caching=False, max_num_seqs=most, **options)
    try:
        with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:
            return [_measured(manager, device, prompts[:count], new) for count in counts]
    finally:
        hf_cb.restore(model)


def _measured(manager: Any, device: str, prompts: Sequence[list[int]], new: int) -> dict[str, Any]:
    on_gpu = device == "cuda"
    kind, activity = (DeviceType.CUDA, ProfilerActivity.CUDA) if on_gpu else (DeviceType.CPU, ProfilerActivity.CPU)
    greedy: dict[str, Any] = {"do_sample": False, "eos_token_id": -1}
    for handle in [manager.submit(p, max_new_tokens=4, **greedy) for p in prompts]:
        handle.result()
    before = len(manager.trace())
    with profile(activities=[activity]) as profiler:
        for handle in [manager.submit(p, max_new_tokens=new, **greedy) for p in prompts]:
            handle.result()
    steps = manager.trace()[before:]
    work = [(e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type == kind]
    decodes = [s for s in steps if s.prefill_tokens == 0 and s.requests == len(prompts)]
    each = [after.started - step.started for step, after in zip(decodes, decodes[1:], strict=False)]
    return dict(
        requests=len(prompts),
        busy=share(work, *_middle(work)) if work else None,
        step_ms=1e3 * sum(each) / max(1, len(each)),
        host_ms=1e3 * sum(s.host_s for s in decodes) / max(1, len(decodes)),
    )
