"""One small mixed forward of a model, watched: what goes in and out of its layers, and what is called when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_cb.models.paged import PagedModel
from hf_cb.models.plan import model_length
from hf_cb.modules.recognise import NotRecognised
from hf_cb.steps import GroupBatch, StepBatch

LENGTHS = (11, 6)
FARTHEST = 2**15  # that the second prompt's positions lie, where the model has so many: what depends on them shows


@dataclass
class Seen:
    """One layer in the forward that was watched: hidden states in and out `[T, H]`, its rotary pair, and the order in
    which its children were called."""

    module: nn.Module
    attention: nn.Module
    before: Tensor | None = None
    after: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    calls: list[nn.Module] = field(default_factory=list)


@dataclass
class Watched:
    """What a forward showed: its layers, the modules that made rotary pairs, what came in last, and the logits."""

    layers: list[Seen]
    batch: StepBatch
    made: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)
    norms: list[tuple[nn.Module, Tensor]] = field(default_factory=list)  # in order, with what they gave
    logits: Tensor | None = None


def watch(paged: PagedModel) -> Watched:
    """Runs `small_batch`; raises NotRecognised where the layers cannot be told apart."""
    model = paged.model
    watched = Watched(_layers_of(paged), small_batch(paged))
    inside = {id(m) for seen in watched.layers for m in seen.module.modules()}
    with _hooks() as hook:
        for seen in watched.layers:
            _watch_layer(seen, hook)
        for module in model.modules():
            if id(module) not in inside and next(module.children(), None) is None:
                hook(module, lambda m, args, kwargs, out: _note(watched, m, args, kwargs, out))
        watched.logits = paged.forward(watched.batch).float()
    if any(seen.before is None or seen.after is None for seen in watched.layers):
        raise NotRecognised("a layer gives its hidden states in an unknown way")
    return watched


def _layers_of(paged: PagedModel) -> list[Seen]:
    attending = {module for module, _ in paged.trace.keys}
    if len(attending) != len(paged.trace.keys):
        raise NotRecognised("a module attends more than once")
    found = []
    for parent in paged.model.modules():
        for child in parent.children() if isinstance(parent, nn.ModuleList) else ():
            inside = [m for m in child.modules() if id(m) in attending]
            if len(inside) == 1 and inside[0] is not child:
                found.append(Seen(child, inside[0]))
    order = {key: i for i, (key, _) in enumerate(paged.trace.keys)}
    found.sort(key=lambda seen: order[id(seen.attention)])
    if len(found) != len(attending):
        raise NotRecognised("its attention modules do not lie in a list of layers, one in each")
    return found


def _watch_layer(seen: Seen, hook: Callable[..., None]) -> None:
    def whole(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        given_back = out[0] if isinstance(out, tuple) else out
        if isinstance(given, Tensor) and isinstance(given_back, Tensor) and given.dim() == given_back.dim() == 3:
            seen.before, seen.after = given[0].clone(), given_back[0].clone()
        pair = kwargs.get("position_embeddings")
        if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(t, Tensor) for t in pair):
            seen.rotary = pair
        elif pair is not None:
            seen.before = None

    hook(seen.module, whole)
    for child in seen.module.children():
        hook(child, lambda m, args, kwargs, out: seen.calls.append(m))


def _note(watched: Watched, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    if isinstance(out, tuple) and len(out) == 2 and all(isinstance(t, Tensor) for t in out):
        watched.made.append((module, args, kwargs, out))
    weight = module._parameters.get("weight")
    if isinstance(out, Tensor) and weight is not None and weight.dim() == 1:
        watched.norms.append((module, out))


@contextmanager
def _hooks() -> Iterator[Callable[..., None]]:
    handles: list[Any] = []
    me = threading.get_ident()

    def hook(module: nn.Module, function: Callable[..., None]) -> None:
        def ours(*call: Any) -> None:
            if threading.get_ident() == me:  # others may compute with the model meanwhile
                function(*call)

        handles.append(module.register_forward_hook(ours, with_kwargs=True))

    try:
        yield hook
    finally:
        for handle in handles:
            handle.remove()


def least_blocks(paged: PagedModel) -> int:
    """KV blocks that `small_batch` writes to."""
    return len(paged.groups) * sum(-(-n // paged.block_size) for n in LENGTHS)


def small_batch(paged: PagedModel) -> StepBatch:
    """Two short prompts in one step, in blocks of their own (the cache is empty when this runs)."""
    block_size, device = paged.block_size, paged.device
    total = sum(LENGTHS)
    vocab = paged.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (total,), generator=torch.Generator().manual_seed(0))
    places = torch.cat([torch.arange(n) for n in LENGTHS])
    far = max(0, min(model_length(paged.model), FARTHEST) - LENGTHS[1])
    positions = places + torch.tensor([0, far]).repeat_interleave(torch.tensor(LENGTHS))
    ends = torch.tensor(LENGTHS).cumsum(0)
    per = [-(-n // block_size) for n in LENGTHS]
    groups, block = [], 1
    for _ in paged.groups:
        table = torch.zeros(len(LENGTHS), max(per), dtype=torch.int32)
        for row, count in zip(table, per, strict=True):
            row[:count] = torch.arange(block, block + count)
            block += count
        rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        blocks = table[rows, places // block_size].long()
        slots = blocks * block_size + places % block_size
        groups.append(GroupBatch(slots.to(device), table.to(device), [], []))
    return StepBatch(
        requests=[],
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        logits_rows=torch.cat([ends - 1, ends - 2]).to(device),
        cu_seqlens_q=torch.cat([torch.zeros(1), ends]).int().to(device),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32).to(device),
        query_lens_list=list(LENGTHS),
        seq_lens_list=list(LENGTHS),
        groups=groups,
        block_size=block_size,
    )
