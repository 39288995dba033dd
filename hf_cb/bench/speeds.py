"""How fast the machine reads memory and multiplies, whoever does it: what a floor is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

READ_BYTES = 2**30  # far beyond every cache
ROWS = (256, 512)  # of a product's input: where rates have settled
SHAPES = 3  # the largest weights
CUT = 4096
SECONDS = 0.15  # that each product is repeated for, at least three times

Multiply = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Speeds:
    """Bytes read a second, and operations a second of the fastest product, with its name."""

    bandwidth: float
    rate: float
    product: str = ""


def best_of(seen: Sequence[Speeds]) -> Speeds:
    """The best of each."""
    fastest = max(seen, key=lambda s: s.rate)
    return Speeds(max(s.bandwidth for s in seen), fastest.rate, fastest.product)


def torch_matmul(weight: Tensor) -> Multiply:
    """`F.linear`, as modules do it."""
    return lambda x: nn.functional.linear(x, weight)


def onednn_packed(weight: Tensor) -> Multiply:
    """oneDNN's product with a weight that was laid out for it once; on the CPU only."""
    if weight.device.type != "cpu":
        raise NotImplementedError("for the CPU")
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to_mkldnn())
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def hf_cb_packed(weight: Tensor) -> Multiply:
    """hf_cb's own product."""
    from hf_cb.kernels.cpu import library as lib
    from hf_cb.kernels.cpu.linear import side_by_side

    found = lib.library()
    if found is None or weight.device.type != "cpu":
        raise NotImplementedError("for the CPU, where the kernels were built")
    (columns,) = side_by_side([weight.shape[0]], weight.shape[1], weight.dtype)
    table, workspace, threads = found.best, lib.Workspace(found), torch.get_num_threads()
    columns.pack(table, weight, threads)
    return lambda x: columns.linear(table, workspace, x, threads)


# name -> takes a weight [out, in] and gives what multiplies [rows, in] by it; one that raises is left out
PRODUCTS: dict[str, Callable[[Tensor], Multiply]] = {
    "torch": torch_matmul,
    "oneDNN packed": onednn_packed,
    "hf_cb": hf_cb_packed,
}


def measure(model: nn.Module, device: torch.device | None = None) -> Speeds:
    """Both speeds, on the model's device, in its dtype and with its largest linear layers' shapes; of a model that has
    shapes alone, on a device where it might be."""
    weights = largest_weights(model, device)
    device = weights[0].device
    rate, product = 0.0, ""
    with torch.no_grad():
        for weight in weights:
            for name, prepare in PRODUCTS.items():
                found = product_rate(prepare, weight)
                if found > rate:
                    rate, product = found, name
        return Speeds(read_bandwidth(device), rate, product)


def largest_weights(model: nn.Module, device: torch.device | None = None) -> list[Tensor]:
    """New random weights, of the shapes of the model's largest floating-point matrices. For another device than its own
    they are cut to `CUT`: the rate is the same, and one that would not fit there can be asked about."""
    floating = [p for p in model.parameters() if p.dim() == 2 and p.is_floating_point()]
    matrices = [p for p in floating if device is not None or p.device.type != "meta"]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    skipped = [id(m.weight) for m in (head, embeddings) if m is not None]  # as large as a vocabulary: too slow to try
    body = [p for p in matrices if id(p) not in skipped] or matrices
    shapes = sorted({tuple(p.shape) for p in body}, key=lambda s: s[0] * s[1], reverse=True)[:SHAPES]
    if device is not None:
        shapes = sorted({tuple(min(size, CUT) for size in shape) for shape in shapes})
    on, dtype = device or body[0].device, body[0].dtype
    return [torch.randn(shape, device=on).to(dtype) for shape in shapes]


def product_rate(prepare: Callable[[Tensor], Multiply], weight: Tensor) -> float:
    """The best operations a second, or 0 where this product cannot be had."""
    best = 0.0
    try:
        multiply = prepare(weight)
        for rows in ROWS:
            x = torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)
            seconds = _quickest(lambda x=x: multiply(x), weight.device)  # type: ignore[misc]
            best = max(best, 2 * rows * weight.numel() / seconds)
    except Exception:  # a build without it, a dtype that it does not know
        return 0.0
    return best


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second: the best of several ways to go through a large tensor once, with all threads."""
    size = min(READ_BYTES, psutil.virtual_memory().available // 8)
    floats = torch.ones(max(size // 4, 2**20), device=device)
    ways: Iterable[Callable[[], Any]] = (
        floats.sum,
        floats.view(torch.int64).sum,
        lambda: floats.view(torch.bfloat16).sum(),
    )
    return 4 * floats.numel() / min(_quickest(way, device) for way in ways)


def _quickest(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the quickest repetition, after one that does not count."""

    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < SECONDS and len(times) < 1000):
        times.append(once())
    return min(times)
