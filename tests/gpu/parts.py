"""The measurements of run.sh: `python parts.py NAME FILE SPEEDS` writes one part's JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from busy import while_decoding
from models import CONFIGS, make, traffic

import hf_cb
from hf_cb.attention.backend import backends
from hf_cb.attention.choice import survey
from hf_cb.bench.engines import HfCb, TransformersBatching
from hf_cb.bench.floor import least_time, model_cost
from hf_cb.bench.speeds import Speeds, measure
from hf_cb.bench.workload import Workload
from hf_cb.steps import GroupBatch, LayerFacts, StepBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNEL_BENCHES = Path(__file__).parent.parent / "gpu_kernels"


def machine(speeds: dict[str, float]) -> dict[str, Any]:
    """Versions, and the bandwidth (bytes/s) and bfloat16 rate (flop/s) that PyTorch reaches here."""
    import transformers
    import triton

    size = "Llama-3.2-1B" if DEVICE == "cuda" else "tiny"
    found = measure(make(size, torch.bfloat16, DEVICE))
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    versions = dict(torch=torch.__version__, transformers=transformers.__version__, triton=triton.__version__)
    return dict(device=name, **versions, bandwidth=found.bandwidth, rate=found.rate) | dict(
        backends=survey(torch.device(DEVICE))
    )


def parity(speeds: dict[str, float]) -> dict[str, Any]:
    """Float32: the tokens of `generate`. bfloat16: the share of tokens that are float32's argmax, and the worst gap."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make("tiny", torch.float32, DEVICE)
    prompts = [r.prompt for r in traffic(CONFIGS["tiny"].vocab_size, 24, 5, 120).requests]
    options = dict(max_new_tokens=48, do_sample=False)
    want = [model.generate(torch.tensor([p], device=DEVICE), **options)[0, len(p) :].tolist() for p in prompts]
    result: dict[str, Any] = {}
    for graphs in (True, False) if DEVICE == "cuda" else (False,):
        hf_cb.accelerate(model, cuda_graphs=graphs)
        got = [r.generated_tokens for r in model.generate_batch(prompts, **options).values()]
        hf_cb.restore(model)
        result[f"float32, graphs {graphs}"] = f"{sum(a == b for a, b in zip(got, want, strict=True))} of {len(want)}"
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


def kernels(speeds: dict[str, float]) -> dict[str, Any]:
    """The benchmark of each of our Triton kernels."""
    found = {}
    for path in sorted(KERNEL_BENCHES.glob("bench_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        bench = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(bench)
        try:
            found[path.stem.removeprefix("bench_")] = bench.measure(speeds["bandwidth"], speeds["rate"])
        except Exception as error:
            found[path.stem.removeprefix("bench_")] = repr(error)
    return found


def attention(speeds: dict[str, float]) -> dict[str, Any]:
    """Each backend's step of decodes against the time that its keys and values take at the measured bandwidth."""
    import triton

    layer = LayerFacts(32, 8, 128, 128, 128**-0.5, torch.bfloat16, torch.device(DEVICE))
    results = []
    for name, kind in backends().items():
        backend = kind()
        problem = backend.missing() or backend.unsupported(layer)
        if problem is not None:
            results.append(dict(backend=name, problem=problem))
            continue
        for batch in (1, 32, 256):
            for context in (1024, 8192, 32768):
                page = backend.usual_block_size
                width = context // page
                storage = backend.allocate(layer, batch * width + 1, page)
                step = decodes(batch, context, width, page)
                meta = backend.prepare(step, step.groups[0], layer.device)
                q, k, v = (torch.randn(batch, h, 128, device=DEVICE, dtype=layer.dtype) for h in (32, 8, 8))
                args = (storage, layer, q, k, v, meta, None)
                ms = triton.testing.do_bench(lambda args=args, b=backend: b.attend(*args), warmup=5, rep=20)
                least = batch * context * 2 * 8 * 128 * 2 / speeds["bandwidth"]
                results.append(dict(backend=name, batch=batch, context=context, ms=ms, floor=least * 1e3 / ms))
                del storage, meta, args
                torch.cuda.empty_cache()
    return {"cases": results}


def decodes(batch: int, context: int, width: int, page: int) -> StepBatch:
    """One new token for each of `batch` requests of `context` tokens, whose blocks lie anywhere."""
    table = (torch.randperm(batch * width, device=DEVICE) + 1).int().view(batch, width)
    slots = table[:, -1].long() * page + page - 1
    rows = torch.arange(batch + 1, device=DEVICE)
    lens = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    group = GroupBatch(slots, table, [], [])
    ids = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    return StepBatch(
        [], ids, lens.long() - 1, rows[:-1], rows.int(), lens, [1] * batch, [context] * batch, [group], page
    )


def engine(speeds: dict[str, float], note: Callable[[dict[str, Any]], object] = lambda found: None) -> dict[str, Any]:
    """256 requests against the floor of bytes and operations and against transformers' own continuous batching, and how
    busy the device is while 256, and one, decode. `note` is told what is found, as it comes."""
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
        floor = least_time(model_cost(model), work, Speeds(speeds["bandwidth"], speeds["rate"], ""), 256, budget=8192)
        found[name] = dict(
            tok_s=run.tok_s,
            seconds=run.seconds,
            problems=run.problems,
            of_the_floor=run.tok_s / floor.tok_s,
            steps=len(run.steps),
            full_decode_steps=len(full),
            host_ms=1e3 * sum(s.host_s for s in full) / max(1, len(full)),
        )
        sizes = ((256, 64, 160), (1, 64, 160)) if cuda else ((4, 8, 24),)
        found[name]["decoding"] = [while_decoding(model, DEVICE, *size) for size in sizes]
        note(found)
        del model, ours
    for name in names:  # last, since it may take longest
        model, work, few = make(name, torch.bfloat16, DEVICE), *loads(CONFIGS[name].vocab_size)
        theirs = TransformersBatching(model)
        theirs.run(few)
        peer = theirs.run(work)
        found[name] |= dict(transformers_tok_s=peer.tok_s, ratio=found[name]["tok_s"] / peer.tok_s)
        note(found)
        del model, theirs
    return found


def loads(vocab: int) -> tuple[Workload, Workload]:
    """What is measured, and a little before it."""
    work = traffic(vocab, 256, 100, 1024) if DEVICE == "cuda" else traffic(vocab, 4, 5, 20)
    return work, traffic(vocab, 8, 16, 64, seed=1)


if __name__ == "__main__":
    part, file, given = sys.argv[1:4]
    options = {"note": lambda found: Path(file).write_text(json.dumps(found))} if part == "engine" else {}
    measured = globals()[part](json.loads(given), **options)
    Path(file).write_text(json.dumps(measured))
