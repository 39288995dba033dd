"""A model driven with paged KV: its own forward, with attention and masks intercepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.interception import AttentionCall, Drive, stepping
from hf_cb.core import Request
from hf_cb.errors import ModelChangedError, OptionError
from hf_cb.kernels.device import host_room, sent
from hf_cb.models.device import device_of, turn
from hf_cb.models.groups import LayerGroup, storage_layers
from hf_cb.models.guard import adapters_of
from hf_cb.models.recurrent import RecurrentStates
from hf_cb.models.rope import LengthDependentRope
from hf_cb.models.sending import to_device
from hf_cb.models.trace import Trace
from hf_cb.modules.weights import mark_of
from hf_cb.steps import Drawn, StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PagedModel:
    """What the engine's runner calls: `forward(batch) -> logits`. Owns the KV storages."""

    def __init__(
        self,
        model: PreTrainedModel,
        trace: Trace,
        groups: Sequence[LayerGroup],
        backend: AttentionBackend,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
    ) -> None:
        self.model = model
        self.trace = trace
        self.groups = list(groups)
        self.backend = backend
        self.num_blocks = num_blocks
        self.block_size = block_size
        # one block more than the pool hands out: block 0 is the null block
        self.storages = [
            backend.allocate(trace.layers[i], num_blocks + 1, block_size) for i in storage_layers(self.groups)
        ]
        self._host_storages = [_on_host(host_blocks, backend.tensors(storage)) for storage in self.storages]
        self._index = {key: i for i, key in enumerate(trace.keys)}
        self._place = {
            layer: (g, storage)
            for g, group in enumerate(self.groups)
            for layer, storage in zip(group.layers, group.storages, strict=True)
        }
        self._picks_rows = model._supports_logits_to_keep()
        self._turn = turn(model)
        found = trace.recurrent
        self.states = RecurrentStates(found.modules, found.make_cache, found.restarting) if found else None
        rope = LengthDependentRope(model)
        self.rope = rope if rope.modules else None
        self._must_be_driven = trace.rotary | {id(m) for m in (found.modules if found else ())}

    scores_prompts = True

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def place(self, layer: int) -> tuple[Any, int]:
        """A layer's storage, and the group that it is in."""
        group, storage = self._place[layer]
        return self.storages[storage], group

    def lend(self) -> None:
        """Nothing is borrowed between steps."""

    def new_requests(self) -> None:
        """Nothing to prepare."""

    def warm_up(self) -> None:
        """Nothing takes long at first."""

    def weights_key(self) -> object:
        """Moves when a parameter was written to or replaced (writes through `.data` leave no trace), a module was, or
        other adapters are active."""
        return [mark for module in _modules(self.model) for mark in _marks_of(module)]

    @property
    def shares_prefixes(self) -> bool:
        """Whether a request can go on from another's keys and values: not where it also needs that one's states."""
        return self.states is None

    @property
    def overlaps(self) -> bool:
        return self.states is None and self.rope is None

    def key_regime(self, request: Request) -> Hashable:
        return self.rope.regime(request) if self.rope is not None else None

    def forget(self, request: Request) -> None:
        if self.states is not None:
            self.states.forget(request)

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> Tensor | Drawn:
        """The logits `[S, V]` of the batch's `logits_rows`; keys and values go to the cache on the way."""
        batch = to_device(batch, self.device)
        self._prepare_blocks(batch)
        return self._compute(batch)

    def _compute(self, batch: StepBatch) -> Tensor:
        wanted = {"logits_to_keep": batch.logits_rows} if self._picks_rows else {}
        drivers = [driver for driver in (self.states, self.rope) if driver is not None]
        drives = {module: drive for driver in drivers for module, drive in driver.drives(batch).items()}
        step = _PagedStep(self, batch, drives)
        with self._turn, stepping(step, [module for driver in drivers for module in driver.modules]):
            out = self.model(
                input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, **wanted
            )
        if step.counts.total() != len(self.trace.keys):
            raise ModelChangedError(
                f"{step.counts.total()} of {len(self.trace.keys)} attention calls reached hf_cb: was the model "
                f"compiled or changed after its first use here?"
            )
        if not self._must_be_driven <= step.driven:
            raise ModelChangedError(
                f"{len(self._must_be_driven - step.driven)} modules that must see each request by itself were not "
                f"reached: has something replaced their forward?"
            )
        return out.logits[0] if self._picks_rows else out.logits[0, batch.logits_rows]

    def _prepare_blocks(self, batch: StepBatch) -> None:
        """Saves and copies before clearing, and all of a storage's copies at once: a source may be new to its owner."""
        for group, part in zip(self.groups, batch.groups, strict=True):
            for storage in group.storages if part.saves else ():
                tensors = self.backend.tensors(self.storages[storage])
                copy_rows(tensors, self._host_storages[storage], part.saves)
        copies: dict[int, list[tuple[int, int]]] = {}
        for group, part in zip(self.groups, batch.groups, strict=True):
            for storage in group.storages if part.copies else ():
                copies.setdefault(storage, []).extend(part.copies)
        for storage, pairs in copies.items():
            self.backend.copy_blocks(self.storages[storage], sent(torch.tensor(pairs), self.device))
        for group, part in zip(self.groups, batch.groups, strict=True):
            if part.cleared and self.backend.clears:
                blocks = sent(torch.tensor(part.cleared), self.device)
                for storage in group.storages:
                    self.backend.clear_blocks(self.storages[storage], blocks)
            for storage in group.storages if part.loads else ():
                copy_rows(self._host_storages[storage], self.backend.tensors(self.storages[storage]), part.loads)


def _on_host(num_blocks: int, like: Sequence[Tensor]) -> list[Tensor]:
    """Room in the host's memory for so many blocks of a storage with these tensors."""
    try:
        return [host_room((num_blocks, *tensor.shape[1:]), tensor.dtype, tensor.device) for tensor in like]
    except RuntimeError as error:
        raise OptionError(f"cpu_offload_space is more than the host has to give ({error}): lower it.") from error


def copy_rows(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """From one device to another, rows that lie together in one piece; the host does not wait."""
    runs: list[tuple[int, int, int]] = []
    for i, j in pairs:
        if runs and (i, j) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((i, j, 1))
    for source, target in zip(sources, targets, strict=True):
        for i, j, count in runs:
            target[j : j + count].copy_(source[i : i + count], non_blocking=True)


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """All modules, as `module.modules()` without its book-keeping: this is asked for at every step."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)


def _marks_of(module: nn.Module) -> Iterator[object]:
    for parameter in module._parameters.values():
        if parameter is not None:
            yield _version_of(parameter)
    attributes = module.__dict__
    if "_active_adapter" in attributes:
        yield adapters_of(attributes)


def _version_of(tensor: Tensor) -> object:
    """Moves when the tensor is written to, or another takes its place. A quantised weight may be a wrapper that owns no
    memory: what is inside tells then."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return mark_of(tensor)
    version = -1 if tensor.is_inference() else tensor._version
    inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return version, [_version_of(t) for t in inside if isinstance(t, Tensor)]


class _PagedStep:
    """The attention of one step of a PagedModel."""

    def __init__(self, owner: PagedModel, batch: StepBatch, drives: Mapping[int, Drive]) -> None:
        self.owner = owner
        self.drives = drives
        self.driven: set[int] = set()
        self.batch = batch
        self.counts: Counter[int] = Counter()
        self.metas: dict[tuple[int, torch.device], Any] = {}

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, sinks: Tensor | None
    ) -> Tensor:
        owner = self.owner
        key = (id(module), self.counts[id(module)])
        self.counts[id(module)] += 1
        index = owner._index.get(key)
        if index is None or owner.trace.calls[index] != call:
            raise ModelChangedError(
                f"{type(module).__name__} attends otherwise than when it was traced ({call}); was the model changed?"
            )
        layer = owner.trace.layers[index]
        other = next((x.dtype for x in (q, k, v) if x.dtype != layer.dtype), layer.dtype)
        if other != layer.dtype or k.device != layer.device:
            raise ModelChangedError(
                f"The model computes in {other} on {k.device} now, and its KV cache is in {layer.dtype} on "
                f"{layer.device}: make a new manager after model.to()."
            )
        group, storage = owner._place[index]
        meta = self.metas.get((group, q.device))
        if meta is None:
            meta = self.metas[group, q.device] = owner.backend.prepare(self.batch, self.batch.groups[group], q.device)
        return owner.backend.attend(owner.storages[storage], layer, q, k, v, meta, sinks)
