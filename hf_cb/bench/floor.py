"""The least time that a workload can take on a machine: no engine is below it, and every one can be held against it.

A step takes the larger of operations / product rate and weight bytes / bandwidth, plus KV bytes read / bandwidth.
Attention's own operations, sampling and everything else cost nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_cb.bench.speeds import Speeds
from hf_cb.bench.workload import BenchRequest, Workload

TOKEN_BUDGET = 512  # query tokens in a step
RECURRENT = ("linear", "mamba", "recurrent", "conv", "rwkv")  # in the names of kinds of layers


@dataclass(frozen=True)
class ModelCost:
    """What a model asks of a machine.

    Args:
        body: weights that each token is multiplied by, without the LM head; of experts, those that one token uses.
        head: weights of the LM head, for each token that is sampled from.
        weight_bytes: read in each step, of both.
        kv_bytes: of one token in one layer's cache, for each layer.
        windows: how far back each layer reads; None for everything.
    """

    body: int
    head: int
    weight_bytes: float
    kv_bytes: tuple[int, ...]
    windows: tuple[int | None, ...]

    def kv_token(self) -> int:
        """Cache bytes of a token in all layers."""
        return sum(self.kv_bytes)

    def kv_read(self, context: int) -> int:
        """Cache bytes that a request of this length reads in a step."""
        pairs = zip(self.kv_bytes, self.windows, strict=True)
        return sum(size * (context if window is None else min(window, context)) for size, window in pairs)


@dataclass(frozen=True)
class Floor:
    """The least seconds, the output tokens a second that they would be, and the steps they were added up from."""

    seconds: float
    tok_s: float
    steps: int


def model_cost(model: Any) -> ModelCost:
    """Counted on a loaded model: matrices are products, embeddings are not."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    skipped = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    if head is not None:
        skipped.add(id(head.weight))
    experts = _experts(config)
    body, size = 0.0, 0.0
    for name, p in model.named_parameters():
        if p.dim() < 2 or id(p) in skipped:
            continue
        # a packed weight (4 bits, say) has fewer elements than products: then the floor is a bit too low, never high
        share = experts if ".experts." in name else 1.0
        body += share * p.numel()
        size += share * p.numel() * p.element_size()
    head_size = 0 if head is None else head.weight.numel()
    if head is not None:
        size += head_size * head.weight.element_size()
    kv, windows = _cache(config, getattr(model, "dtype", None))
    return ModelCost(int(body), head_size, size, kv, windows)


def least_time(
    cost: ModelCost,
    work: Workload,
    speeds: Speeds,
    max_seqs: int,
    prefix_caching: bool = False,
    budget: int = TOKEN_BUDGET,
) -> Floor:
    """Goes through the workload step by step: decode first, then prompts in pieces, as far as the budget goes.

    With prefix caching, a beginning that an earlier request has too is neither computed nor read again.
    """
    waiting = [_Progress(r) for r in sorted(work.requests, key=lambda r: r.arrival)]
    if prefix_caching:
        _share(waiting)
    waiting.reverse()
    alive: list[_Progress] = []
    now, steps = 0.0, 0
    while waiting or alive:
        while waiting and len(alive) < max_seqs and waiting[-1].arrival <= now:
            alive.append(waiting.pop())
        if not alive:
            now = waiting[-1].arrival
            continue
        now += _step(cost, alive, speeds, budget)
        steps += 1
        alive = [p for p in alive if p.left > 0]
    return Floor(now, work.output_tokens / now, steps)


def step_seconds(cost: ModelCost, tokens: int, rows: int, kv_read: int, speeds: Speeds) -> float:
    """The least that a step takes, of so many query tokens, rows of logits and bytes of cache to read."""
    products = 2 * (tokens * cost.body + rows * cost.head) / speeds.rate
    return max(products, cost.weight_bytes / speeds.bandwidth) + kv_read / speeds.bandwidth


class _Progress:
    def __init__(self, request: BenchRequest) -> None:
        self.ids, self.left, self.arrival = request.prompt, request.max_new, request.arrival
        self.prompt = len(request.prompt)
        self.context = self.shared = 0


def _share(requests: list[_Progress]) -> None:
    """The last token of a prompt is always computed: its logits are needed."""
    for i, request in enumerate(requests):
        lengths = (_common(request.ids, other.ids) for other in requests[:i])
        request.context = request.shared = min(max(lengths, default=0), request.prompt - 1)


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _step(cost: ModelCost, alive: list[_Progress], speeds: Speeds, budget: int) -> float:
    tokens = rows = read = shared = 0
    for p in sorted(alive, key=lambda p: p.context < p.prompt):  # decode first
        take = min(max(1, p.prompt - p.context), budget - tokens)
        if take <= 0:
            break
        tokens += take
        p.context += take
        read += cost.kv_read(p.context) - cost.kv_read(p.shared)
        shared = max(shared, p.shared)
        if p.context >= p.prompt:
            rows += 1
            p.left -= 1
    return step_seconds(cost, tokens, rows, read + cost.kv_read(shared), speeds)


def _experts(config: Any) -> float:
    """The share of all experts that one token uses; 1 without experts."""
    used = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((n for name in names if (n := getattr(config, name, None))), None)
    return min(1.0, used / total) if used and total else 1.0


def _cache(config: Any, dtype: Any) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Bytes of a token and the window, for each layer; recurrent layers, whose state does not grow, count nothing."""
    layers = config.num_hidden_layers
    size = getattr(dtype, "itemsize", 2)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    window = getattr(config, "sliding_window", None)
    own = getattr(config, "per_layer_config", None)  # of layers that differ
    tokens = [
        0 if any(word in kind for word in RECURRENT) else size * _values(own[i] if own else config)
        for i, kind in enumerate(kinds)
    ]
    return tuple(tokens), tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _values(config: Any) -> int:
    """Numbers in the cache for a token in one layer."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:  # recurrent throughout
        return 0
    if getattr(config, "kv_lora_rank", None):  # what can be kept instead of keys and values
        return config.kv_lora_rank + (getattr(config, "qk_rope_head_dim", None) or 0)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * (getattr(config, "num_key_value_heads", None) or heads) * dim
