"""Other tiles, pipelines and splits of paged attention than the ones it chooses, timed side by side: what to choose."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_cb.kernels.triton import paged_attention as op
from hf_cb.kernels.triton.paged_attention_config import Config

BENCH = Path(__file__).parent.parent / "gpu_kernels" / "bench_paged_attention.py"
CASES = ("decode", "prompts", "decode, one", "decode, e4m3", "decode, many")  # of the benchmark
# keys, warps, stages: those of many that by registers, shared memory and instructions for sm_90 may be as good
DECODES = [Config(16, *rest) for rest in ((128, 4, 2), (64, 4, 4), (64, 4, 2), (64, 8, 3), (32, 4, 4), (128, 8, 2))]
PROMPTS = [Config(128, *rest) for rest in ((64, 8, 2), (128, 8, 2), (128, 8, 3), (32, 8, 4))]
SPLITS = (2, 3, 4, 6, 8, 12)  # programs a multiprocessor


def measure(device: str, note: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Milliseconds of each: "as chosen", by `PROGRAMS_PER_SM`, and by tile (rows, keys, warps, stages)."""
    spec = importlib.util.spec_from_file_location(BENCH.stem, BENCH)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    cases = {case.name: case for case in bench.CASES}
    found: dict[str, Any] = {}
    for name in CASES:
        given = bench.arguments(cases[name], device)
        found[name] = times = {}
        for variant, change in variants(prompts=name == "prompts"):
            kept = {key: getattr(op, key) for key in change}
            try:
                vars(op).update(change)
                times[variant] = milliseconds(lambda given=given: op.paged_attention(**given), device)
            except Exception as error:  # more than the device has, most likely
                times[variant] = repr(error)[:100]
            finally:
                vars(op).update(kept)
            note(found)
    return found


def variants(prompts: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names, and what of the launcher is another."""
    yield "as chosen", {}
    if not prompts:
        for programs in SPLITS:
            yield f"{programs} programs", dict(PROGRAMS_PER_SM=programs)
    for config in PROMPTS if prompts else DECODES:
        tile = f"{config.block_m} {config.block_n} {config.num_warps} {config.num_stages}"
        yield tile, dict(config_for=lambda *given, config=config: config)


def milliseconds(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        call()
        return 0.0
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(call, rep=10, return_mode="median")
