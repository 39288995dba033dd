"""What a fused layer costs the host: its launches, without the kernels.

usage: TRITON_INTERPRET=1 PYTHONPATH=tests python tests/gpu_kernels/launch_cost.py

On a GPU a step with prompts is launched piece by piece, so a layer should not take the host longer than the device. The
launch of a kernel itself, some 10 to 20 microseconds with Triton, is not in it; PyTorch's own operators are.
"""

from __future__ import annotations

import statistics
import time
from array import array
from typing import Any

import torch
from fused_models import Harness, make

from hf_cb.attention import interception
from hf_cb.core import Request, SamplingParams
from hf_cb.engine.batch import build
from hf_cb.kernels.triton import activation, kv_store, paged_attention, rms_norm, rope_store
from hf_cb.steps import PlanPart, StepPlan

LAYERS, ROUNDS = 8, 300
KERNELS = {
    activation: ["act_and_mul_kernel"],
    kv_store: ["store_kv_kernel"],
    paged_attention: ["unified_kernel", "split_kernel", "merge_kernel"],
    rms_norm: ["rms_norm_kernel"],
    rope_store: ["rope_store_kernel"],
}


class Nothing:
    """In place of a kernel."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None


def part(name: str, start: int, count: int, blocks: list[int], groups: int) -> PlanPart:
    request = Request(name, [1] * (start + count), SamplingParams(5), tables=[array("i", blocks)] * groups)
    return PlanPart(request, start, count, 1)


def main() -> None:
    torch.set_num_threads(1)
    interception.install(__name__)
    runner = Harness(make("Qwen3", num_hidden_layers=LAYERS), max_num_seqs=8, num_blocks=100).runner
    groups = len(runner.groups)
    parts = [part(f"r{i}", 8, 1, [1 + 3 * i, 2 + 3 * i, 3 + 3 * i], groups) for i in range(6)]
    batch = build(StepPlan([*parts, part("prompt", 0, 8, [30, 31], groups)]), groups, 4)
    for module, names in KERNELS.items():
        for name in names:
            assert hasattr(module, name)
            setattr(module, name, Nothing())
    took = []
    with torch.no_grad():
        for _ in range(ROUNDS):
            began = time.perf_counter()
            runner._compute(batch)
            took.append(time.perf_counter() - began)
    print(f"{statistics.median(took) / LAYERS * 1e6:.0f} microseconds a layer (median of {ROUNDS} steps)")


if __name__ == "__main__":
    main()
