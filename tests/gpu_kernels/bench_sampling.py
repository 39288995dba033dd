"""How long sampling takes, beside one reading of the logits: `python bench_sampling.py BYTES_PER_S FLOP_PER_S`.

Logits are made up: noise with a standard deviation of 2.5 and, in one of 1,000 places, up to 12 more. Their nucleus of
0.95 has about 100 of 128,256 tokens and 14,000 of 262,144, more than the list of candidates holds.
"""

from __future__ import annotations

import json
import sys

import torch

ROWS, VOCABS = (1, 32, 256), (128256, 262144)
SETTINGS = {
    "greedy": dict(temperature=0.0),
    "temperature": {},
    "top_k": dict(top_k=50),
    "top_p": dict(top_p=0.95),
    "all": dict(temperature=0.7, top_k=50, top_p=0.95, min_p=0.02),
}


def paper(rows: int, vocab: int, itemsize: int, setting: str) -> dict[str, int]:
    """Bytes of one reading, and the least operations: a comparison for each logit, or with a distribution over all of
    them a quotient, two logarithms, a quarter of Philox' 100 whole-number operations and a comparison."""
    return dict(bytes=rows * vocab * itemsize, flops=rows * vocab * (29 if setting == "temperature" else 1))


def measure(bandwidth: float, rate: float) -> list[dict]:
    """Times on the GPU. `floor` is the share of the time that the bytes (at `bandwidth`, bytes/s) or the operations (at
    `rate`, flop/s) would take at least."""
    import triton

    from hf_cb.kernels.triton.sampling import argmax, sample

    dtypes = dict(temperature=torch.float32, top_k=torch.int32, top_p=torch.float32, min_p=torch.float32)
    usual = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    results = []
    for rows, vocab, dtype in [(r, v, d) for r in ROWS for v in VOCABS for d in (torch.bfloat16, torch.float32)]:
        x = 2.5 * torch.randn(rows, vocab, device="cuda")
        x = (x + (torch.rand_like(x) < 0.001) * 12 * torch.rand_like(x)).to(dtype)
        out, places = torch.empty(rows, dtype=torch.int64, device="cuda"), torch.arange(rows, device="cuda")
        runs = {"argmax": lambda x=x, out=out: argmax(x, out)}
        for name, setting in SETTINGS.items():
            full = usual | setting
            given = {n: torch.full((rows,), full[n], dtype=d, device="cuda") for n, d in dtypes.items()}
            given |= dict(seeds=places, positions=places, out=out)
            runs[name] = lambda x=x, given=given: sample(x, **given)
        for name, run in runs.items():
            seconds = 1e-3 * triton.testing.do_bench(run, return_mode="median")
            cost = paper(rows, vocab, dtype.itemsize, name)
            least = max(cost["bytes"] / bandwidth, cost["flops"] / rate)
            shape = dict(setting=name, rows=rows, vocab=vocab, dtype=str(dtype))
            results.append(dict(kernel="sample", **shape, **cost, seconds=seconds, floor=least / seconds))
    return results


if __name__ == "__main__":
    for result in measure(*map(float, sys.argv[1:3])):
        print(json.dumps(result))
