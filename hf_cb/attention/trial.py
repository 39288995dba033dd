"""A trial of a backend on the device: what a signature does not tell, a small computation does.

Installed kernels differ by version, build flags and device: some raise, some leave an argument out of account without a
word. So before a GPU's backend gets a layer, it computes a few tokens of one like it, and plain PyTorch computes them
again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_cb.kernels.reference.paged_attention import chunk_attention
from hf_cb.steps import NULL_BLOCK, GroupBatch, LayerFacts, StepBatch

if TYPE_CHECKING:
    from hf_cb.attention.backend import AttentionBackend

TALL = 64  # rows of queries (tokens times heads of a KV head) beyond which our kernels take their largest tiles
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # of results around one

_known: dict[tuple[type, LayerFacts, torch.dtype, int], str | None] = {}


def failure(
    backend: AttentionBackend, layer: LayerFacts, kept_in: torch.dtype | None = None, block_size: int | None = None
) -> str | None:
    """Why the backend cannot be trusted with such a layer, or None; measured once a process.

    `kept_in`: what it rounds keys and values to, if not the layer's own dtype; `block_size`: if not its usual one.
    """
    small, kept, page = _like(layer), kept_in or layer.dtype, block_size or backend.usual_block_size
    key = (type(backend), small, kept, page)
    if key not in _known:
        _known[key] = _measure(backend, small, kept, page)
    return _known[key]


def _like(layer: LayerFacts) -> LayerFacts:
    """The same kind of layer, with a window, chunk and soft-cap that matter within a few tokens."""
    return dataclasses.replace(
        layer,
        scale=layer.head_dim**-0.5,
        window=3 if layer.window is not None else None,
        chunk=4 if layer.chunk is not None else None,
        softcap=1.0 if layer.softcap else None,
    )


@torch.no_grad()
def _measure(backend: AttentionBackend, layer: LayerFacts, kept: torch.dtype, page: int) -> str | None:
    try:
        off = _distance(backend, layer, kept, page)
    except (MemoryError, torch.OutOfMemoryError):
        raise  # says nothing about the backend
    except Exception as error:
        return f"a trial of it ends with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return f"a trial of it is off by {off:.1g}" if not off <= TOLERANCE.get(layer.dtype, 1e-3) else None  # NaN too


@dataclass
class _Request:
    """What a request has stored so far, on the CPU."""

    table: list[int]
    k: Tensor
    v: Tensor

    def attend(self, layer: LayerFacts, q: Tensor, sinks: Tensor | None) -> Tensor:
        """Its newest tokens, in float32 and plain PyTorch."""
        k, v = (x.float().transpose(0, 1) for x in (self.k, self.v))
        options = (layer.scale, layer.window, layer.chunk, layer.softcap, sinks)
        return chunk_attention(q.float(), k, v, len(self.k) - len(q), 0, *options)


def _distance(backend: AttentionBackend, layer: LayerFacts, kept: torch.dtype, page: int) -> float:
    """The largest error, in steps with a chunk and with decodes alone, on blocks that have had an owner.

    The chunk is long enough for the largest tiles of queries, which must fit the device: see `TALL`.
    """
    generator = torch.Generator().manual_seed(0)
    kv_shapes = (layer.num_kv_heads, layer.head_dim), (layer.num_kv_heads, layer.v_head_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(layer.dtype)

    sinks = random(layer.num_heads) if layer.has_sinks else None
    long = max(page - 1, TALL * layer.num_kv_heads // layer.num_heads + 1)
    steps = ([long, 2], [1, 4], [1, 1], [1, 1])
    needed = [-(-sum(news) // page) for news in zip(*steps, strict=True)]
    blocks = list(range(sum(needed), 0, -1))  # backwards: what takes them in their order is found out
    padding = [NULL_BLOCK] * max(needed)
    tables = [(own + padding)[: max(needed)] for own in (blocks[: needed[0]], blocks[needed[0] :])]
    storage = backend.allocate(layer, len(blocks) + 1, page)
    for cache in storage:
        cache[1:] = float("nan")
    backend.clear_blocks(storage, torch.tensor(blocks, device=layer.device))
    requests = [_Request(table, *(random(0, *shape) for shape in kv_shapes)) for table in tables]
    errors = []
    for news in steps:
        q, k, v = (random(sum(news), *shape) for shape in ((layer.num_heads, layer.head_dim), *kv_shapes))
        stored = [x.to(kept).to(x.dtype).split(news) for x in (k, v)]
        for request, new_k, new_v in zip(requests, *stored, strict=True):
            request.k, request.v = torch.cat([request.k, new_k]), torch.cat([request.v, new_v])
        batch = small_step(news, [len(r.k) for r in requests], [r.table for r in requests], page, layer.device)
        meta = backend.prepare(batch, batch.groups[0], layer.device)
        q_there, k_there, v_there = (x.to(layer.device) for x in (q, k, v))
        sinks_there = sinks.to(layer.device) if sinks is not None else None
        got = backend.attend(storage, layer, q_there, k_there, v_there, meta, sinks_there).cpu()
        for request, own_q, own in zip(requests, q.split(news), got.split(news), strict=True):
            errors.append((own.float() - request.attend(layer, own_q, sinks)).abs().max())
    return float(torch.stack(errors).max())  # NaN if one is


def small_step(
    news: list[int], lengths: list[int], tables: list[list[int]], page: int, device: torch.device
) -> StepBatch:
    """A step in which requests that then have these lengths and blocks have so many new tokens each."""
    slots = [
        table[position // page] * page + position % page
        for new, length, table in zip(news, lengths, tables, strict=True)
        for position in range(length - new, length)
    ]

    def ints(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    unused = torch.zeros(0, dtype=torch.int64, device=device)
    return StepBatch(
        requests=[],
        input_ids=unused,
        position_ids=unused,
        logits_rows=unused,
        cu_seqlens_q=ints([0, *accumulate(news)]),
        seq_lens=ints(lengths),
        query_lens_list=news,
        seq_lens_list=lengths,
        groups=[GroupBatch(ints(slots).long(), ints(tables), copies=[], cleared=[])],
        block_size=page,
    )
