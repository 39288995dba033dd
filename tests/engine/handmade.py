"""Parts of steps made by hand, and the attention that they are to get."""

from __future__ import annotations

from array import array

import torch
from fake_runner import request

from hf_cb.kernels.reference.paged_attention import visible
from hf_cb.steps import LayerFacts, PlanPart


def part(prompt: list[int], computed: int, count: int, tables: list[list[int]], samples: int = 0, **more) -> PlanPart:
    r = request("r", prompt)
    r.num_computed, r.tables = computed, [array("i", table) for table in tables]
    return PlanPart(r, computed, count + len(more.get("drafts", [])), samples, **more)


def plain_attention(layer: LayerFacts, q, k, v, start: int, sinks) -> torch.Tensor:
    """One request, all heads expanded, float64: the definition."""
    group = layer.num_heads // layer.num_kv_heads
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    at = torch.arange(start, start + len(q))[:, None]
    scores.masked_fill_(~visible(at, torch.arange(k.shape[1])[None], layer.window, layer.chunk), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    return (scores.softmax(-1)[..., : v.shape[1]] @ v).transpose(0, 1)
