"""Each attention backend's time against its floor: decodes and prompts, 8 KV heads of 128, 32 query heads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_cb.attention.backend import AttentionBackend, backends
from hf_cb.bench.speeds import Speeds
from hf_cb.steps import GroupBatch, LayerFacts, StepBatch

ROTATED = 2**28  # bytes of keys and values that repetitions take turns in: several times a GPU's L2
PLAIN = 2**28  # bytes beyond which plain PyTorch, which gathers all of them, is not asked


@dataclass(frozen=True)
class Case:
    """A step of `batch` requests of `context` tokens, the last `new` of which are computed in it."""

    batch: int
    context: int
    new: int = 1

    def floor(self, layer: LayerFacts, speeds: Speeds) -> float:
        """Seconds that keys, values, queries and results take, or the operations of what is seen, if that is more."""
        rows, pairs = self.batch * self.new, self.batch * self.new * (self.context - (self.new - 1) / 2)
        kept = self.batch * self.context * layer.num_kv_heads
        moved = (kept + rows * layer.num_heads) * (layer.head_dim + layer.v_head_dim) * layer.dtype.itemsize
        operations = 2 * pairs * layer.num_heads * (layer.head_dim + layer.v_head_dim)
        return max(moved / speeds.bandwidth, operations / speeds.rate)

    def kept_bytes(self, layer: LayerFacts) -> int:
        heads = layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
        return self.batch * self.context * heads * layer.dtype.itemsize


# what is asked for first, should the time be short; the largest needs 32 GiB
CASES = (
    Case(32, 8192),
    Case(4, 4096, 4096),
    Case(256, 1024),
    Case(1, 8192),
    Case(32, 1024),
    Case(32, 32768),
    Case(1, 32768),
    Case(1, 1024),
    Case(256, 8192),
    Case(256, 32768),
    Case(1, 8192, 8192),
    Case(1, 32768, 2048),
    Case(32, 8192, 5),
)
SMALL = (Case(2, 64), Case(1, 48, 16))  # for a dry run on a CPU


def usual_layer(device: str) -> LayerFacts:
    return LayerFacts(32, 8, 128, 128, 128**-0.5, torch.bfloat16, torch.device(device))


def measure(device: str, speeds: Speeds, note: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """`floor` is the share of the time that the floor would take. A backend or case that fails says why."""
    layer = usual_layer(device)
    usable: dict[str, AttentionBackend] = {}
    found: dict[str, Any] = {"problems": {}, "cases": []}
    for name, kind in backends().items():
        try:
            backend = kind()
            problem = backend.missing() or backend.unsupported(layer)
        except Exception as error:
            problem = repr(error)
        if problem is None:
            usable[name] = backend
        else:
            found["problems"][name] = problem
    for case, name in itertools.product(CASES if device == "cuda" else SMALL, usable):
        if name == "reference" and case.kept_bytes(layer) > PLAIN:
            continue
        result: dict[str, Any] = dict(backend=name, batch=case.batch, context=case.context, new=case.new)
        try:
            seconds = time_of(usable[name], layer, case)
            result |= dict(ms=1e3 * seconds, floor=case.floor(layer, speeds) / seconds)
        except Exception as error:  # out of memory, most likely
            result["error"] = repr(error)[:300]
        found["cases"].append(result)
        note(found)
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


@torch.no_grad()
def time_of(backend: AttentionBackend, layer: LayerFacts, case: Case) -> float:
    """Seconds of a call of `attend`, which stores the new keys and values too."""
    page = backend.usual_block_size
    width = -(-case.context // page)
    turns = max(1, min(32, ROTATED // case.kept_bytes(layer)))
    blocks = turns * case.batch * width
    storage = backend.allocate(layer, blocks + 1, page)
    for cache in backend.tensors(storage):
        cache.normal_()
    table = (torch.randperm(blocks) + 1).int().view(turns, case.batch, width)
    steps = [step_of(case, each, page) for each in table]
    metas = [backend.prepare(step, step.groups[0], layer.device) for step in steps]
    tokens = case.batch * case.new
    shapes = ((layer.num_heads, layer.head_dim), (layer.num_kv_heads, layer.head_dim))
    q, k = (torch.randn(tokens, *shape, device=layer.device, dtype=layer.dtype) for shape in shapes)
    v = torch.randn_like(k)

    def calls() -> None:
        for meta in metas:
            backend.attend(storage, layer, q, k, v, meta, None)

    return seconds_of(calls, layer.device) / turns


def step_of(case: Case, table: torch.Tensor, page: int) -> StepBatch:
    """With blocks `[batch, width]`, as after some traffic anywhere."""
    batch, new, context = case.batch, case.new, case.context
    positions = torch.arange(context - new, context)
    slots = (table[:, positions // page].long() * page + positions % page).flatten()
    starts = torch.arange(batch + 1) * new
    lens = torch.full((batch,), context, dtype=torch.int32)
    ids = torch.zeros(batch * new, dtype=torch.int64)
    group = GroupBatch(slots, table, [], [])
    counts, lengths = [new] * batch, [context] * batch
    last = starts[1:] - 1
    return StepBatch([], ids, positions.repeat(batch), last, starts.int(), lens, counts, lengths, [group], page)


def seconds_of(calls: Callable[[], None], device: torch.device) -> float:
    """The median of some repetitions: of a graph's, so that launching costs nothing, where one can be recorded."""
    from triton.testing import do_bench, do_bench_cudagraph

    if device.type == "cpu":
        began = time.perf_counter()
        calls()
        return time.perf_counter() - began
    try:
        return 1e-3 * do_bench_cudagraph(calls, rep=10, return_mode="median")
    except Exception:  # it looks at lengths, or allocates
        torch.cuda.synchronize()
        return 1e-3 * do_bench(calls, warmup=5, rep=20, return_mode="median")
