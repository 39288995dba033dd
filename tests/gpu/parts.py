"""The measurements of run.sh: `python parts.py NAME FILE SPEEDS` writes one part's JSON."""

from __future__ import annotations

import gc
import importlib.util
import json
import platform
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import backend_times
import torch
from busy import while_decoding
from models import CONFIGS, make, traffic

import hf_cb
from hf_cb.attention.choice import survey
from hf_cb.bench.engines import HfCb, TransformersBatching
from hf_cb.bench.floor import ModelCost, least_time, model_cost, step_seconds
from hf_cb.bench.speeds import Speeds, measure, product_rate, torch_matmul
from hf_cb.bench.workload import Workload
from hf_cb.steps import StepRecord

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL_BENCHES = Path(__file__).parent.parent / "gpu_kernels"
FIRST = ("bench_paged_attention", "bench_rms_norm")  # of them, should the time be short
Note = Callable[[dict[str, Any]], object]  # is told what is found, as it comes


def machine(speeds: dict[str, float], note: Note) -> dict[str, Any]:
    """Versions, and the bandwidth (bytes/s) and bfloat16 rate (flop/s) that PyTorch reaches here."""
    import transformers
    import triton

    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    versions = dict(torch=torch.__version__, transformers=transformers.__version__, triton=triton.__version__)
    result: dict[str, Any] = dict(device=name, python=platform.python_version(), **versions)
    note(result)
    found = measure(make("Llama-3.2-1B" if DEVICE == "cuda" else "tiny", torch.bfloat16, DEVICE))
    result |= dict(bandwidth=found.bandwidth, rate=found.rate)
    if DEVICE == "cuda":
        result["bandwidth"] = max(found.bandwidth, copy_bandwidth())
        side = 8192  # the model's own shapes are too small to show what a prompt's attention may reach
        result["rate"] = max(found.rate, product_rate(torch_matmul, torch.randn(side, side, device=DEVICE).bfloat16()))
    note(result)
    return result | dict(backends=survey(torch.device(DEVICE)))


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    from triton.testing import do_bench

    source = torch.randn(2**30, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * do_bench(lambda: target.copy_(source), return_mode="median"))


def parity(speeds: dict[str, float], note: Note) -> dict[str, Any]:
    """Float32: the tokens of `generate`, and those that are drawn in recorded steps as behind others. bfloat16: the
    share of tokens that are float32's argmax, and the worst gap."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make("tiny", torch.float32, DEVICE)
    prompts = [r.prompt for r in traffic(CONFIGS["tiny"].vocab_size, 24, 5, 120).requests]
    options = dict(max_new_tokens=48, do_sample=False)
    want = [model.generate(torch.tensor([p], device=DEVICE), **options)[0, len(p) :].tolist() for p in prompts]
    drawing = dict(max_new_tokens=48, do_sample=True, temperature=0.8, top_k=50, top_p=0.9, seed=7, logprobs=True)
    result: dict[str, Any] = {}
    drawn: list[list[int]] = []
    for graphs in (True, False) if DEVICE == "cuda" else (False,):
        hf_cb.accelerate(model, cuda_graphs=graphs)
        got = [r.generated_tokens for r in model.generate_batch(prompts, **options).values()]
        result[f"float32, graphs {graphs}"] = same(got, want)
        before, drawn = drawn, [r.generated_tokens for r in model.generate_batch(prompts, **drawing).values()]
        result["float32, drawn alike"] = same(before or drawn, drawn)
        hf_cb.restore(model)
        note(result)
    half = make("tiny", torch.bfloat16, DEVICE)
    hf_cb.accelerate(half)
    got = [r.generated_tokens for r in half.generate_batch(prompts, **options).values()]
    gaps = []
    for prompt, tokens in zip(prompts, got, strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt + tokens], device=DEVICE)
            logits = half.float()(ids).logits[0, len(prompt) - 1 : -1]
        gaps += (logits.max(-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]).tolist()
        half.bfloat16()
    return result | dict(bfloat16_argmax=sum(g == 0 for g in gaps) / len(gaps), bfloat16_worst=max(gaps))


def same(some: list[list[int]], others: list[list[int]]) -> str:
    return f"{sum(a == b for a, b in zip(some, others, strict=True))} of {len(others)}"


def kernels(speeds: dict[str, float], note: Note) -> dict[str, Any]:
    """The benchmark of each of our Triton kernels."""
    found: dict[str, Any] = {}
    for path in sorted(KERNEL_BENCHES.glob("bench_*.py"), key=lambda path: (path.stem not in FIRST, path.stem)):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        bench = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(bench)
        try:
            found[path.stem.removeprefix("bench_")] = bench.measure(speeds["bandwidth"], speeds["rate"])
        except Exception as error:
            found[path.stem.removeprefix("bench_")] = repr(error)
        note(found)
    return found


def attention(speeds: dict[str, float], note: Note) -> dict[str, Any]:
    """Each backend's steps of decodes and of prompts."""
    return backend_times.measure(DEVICE, Speeds(speeds["bandwidth"], speeds["rate"]), note)


def variants(speeds: dict[str, float], note: Note) -> dict[str, Any]:
    """Attention's other tiles and splits."""
    import variants

    return variants.measure(DEVICE, note)


def engine(speeds: dict[str, float], note: Note) -> dict[str, Any]:
    """256 requests against the floor of bytes and operations and against transformers' own continuous batching, and how
    busy the device is while 256, and one, decode."""
    found: dict[str, Any] = {}
    cuda = DEVICE == "cuda"
    names = [n for n in CONFIGS if n != "tiny"] if cuda else ["tiny"]
    for name in names:
        model, work, few = make(name, torch.bfloat16, DEVICE), *loads(CONFIGS[name].vocab_size)
        ours = HfCb(model)
        ours.run(few)
        run = ours.run(work)
        most = max(step.requests for step in run.steps)
        full = [step for step in run.steps if step.prefill_tokens == 0 and step.requests >= 0.9 * most]
        cost, fastest = model_cost(model), Speeds(speeds["bandwidth"], speeds["rate"])
        floor = least_time(cost, work, fastest, 256, budget=8192)
        found[name] = dict(
            tok_s=run.tok_s,
            seconds=run.seconds,
            problems=run.problems,
            of_the_floor=run.tok_s / floor.tok_s,
            steps=len(run.steps),
            full_decode_steps=len(full),
            full_decodes_of_the_floor=of_the_floor(run.steps, full, cost, fastest),
            host_ms=1e3 * sum(s.host_s for s in full) / max(1, len(full)),
        )
        note(found)
        size: tuple[Any, ...] = ((256, 1), 64, 96) if cuda else ((4, 1), 8, 24)
        found[name]["decoding"] = while_decoding(model, DEVICE, *size)
        note(found)
        del model, ours
        freed()
    for name in names:  # last, since it may take longest
        model, work, few = make(name, torch.bfloat16, DEVICE), *loads(CONFIGS[name].vocab_size)
        theirs = TransformersBatching(model)
        theirs.run(few)
        peer = theirs.run(work)
        found[name] |= dict(transformers_tok_s=peer.tok_s, ratio=found[name]["tok_s"] / peer.tok_s)
        note(found)
        del model, theirs
        freed()
    return found


def freed() -> None:
    """What a model and its caches took is there for the next: engines ask how much memory is free."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def of_the_floor(
    steps: Sequence[StepRecord], full: Sequence[StepRecord], cost: ModelCost, fastest: Speeds
) -> float | None:
    """The share of these steps' time, from each one's start to the next one's, that their bytes would take at least."""
    wanted = {step.step for step in full}
    least = spent = 0.0
    for step, following in pairwise(steps):
        if step.step in wanted:
            read = sum(cost.kv_read(share.start + share.num_tokens) for share in step.shares)
            least += step_seconds(cost, step.decode_tokens, step.sampled, read, fastest)
            spent += following.started - step.started
    return least / spent if spent else None


def loads(vocab: int) -> tuple[Workload, Workload]:
    """What is measured, and a little before it."""
    work = traffic(vocab, 256, 100, 1024) if DEVICE == "cuda" else traffic(vocab, 4, 5, 20)
    return work, traffic(vocab, 8, 16, 64, seed=1)


if __name__ == "__main__":
    part, file, given = sys.argv[1:4]

    def note(found: dict[str, Any]) -> None:
        """Whole or not at all: the part may be ended at any moment."""
        written = Path(f"{file}.new")
        written.write_text(json.dumps(found))
        written.replace(file)

    note(globals()[part](json.loads(given), note))
