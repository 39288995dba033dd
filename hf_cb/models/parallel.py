"""One step in several processes at once: the driver's runner says what it is about to compute, and the others do it.

Each process has its own share of the model's heads and weights and its own KV cache, with the same blocks in it; the
collectives inside the model's layers put the shares together. The driver alone schedules and samples, so that a step is
all that the others have to know: the numbers of its StepBatch travel as one tensor over the model's own process group,
in the order of the device's work and without waiting for it, and the rest as a few bytes beside it (vLLM's and SGLang's
drivers do the same with their plans).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed

from hf_cb.core import Request, SamplingParams
from hf_cb.models.dense import DenseModel
from hf_cb.models.groups import LayerGroup
from hf_cb.models.paged import PagedModel
from hf_cb.models.sending import to_device
from hf_cb.steps import Drawn, GroupBatch, StepBatch

Inner = PagedModel | DenseModel


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in a header: the next so many of the step's numbers are its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class Header:
    """A step without its numbers. `requests` has for each one its arrival, the length of its prompt, and the token ids
    that were not told before; those in `forgotten` have ended or given way since the last step."""

    batch: dict[str, Any]
    groups: list[dict[str, Any]]
    count: int  # of the numbers
    requests: list[tuple[int, int, list[int]]]
    forgotten: list[int]


class LeadingRunner:
    """The driver's runner: a step is told to the other processes, and then computed with them.

    Args:
        inner: what computes this process's share.
        section: a context in which all processes do what they are told; it sees to what happens when one of them fails.
        group: the model's process group.
    """

    def __init__(
        self, inner: Inner, section: Callable[[tuple[Any, ...]], AbstractContextManager[Any]], key: int, group: Any
    ) -> None:
        self.inner = inner
        self.groups: list[LayerGroup] = inner.groups
        self._section = section
        self._key = key
        self._group = group
        self._told: dict[Request, int] = {}  # how many of its token ids the others have
        self._forgotten: list[int] = []

    @property
    def shares_prefixes(self) -> bool:
        return self.inner.shares_prefixes

    @property
    def overlaps(self) -> bool:
        return self.inner.overlaps

    @property
    def scores_prompts(self) -> bool:
        return self.inner.scores_prompts

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def lend(self) -> None:
        self.inner.lend()

    def new_requests(self) -> None:
        self.inner.new_requests()

    def warm_up(self) -> None:
        """Steps of several processes are not recorded."""

    def weights_key(self) -> object:
        return self.inner.weights_key()

    def key_regime(self, request: Request) -> Hashable:
        return self.inner.key_regime(request)

    def forget(self, request: Request) -> None:
        if self._told.pop(request, None) is not None:
            self._forgotten.append(request.arrival)
        self.inner.forget(request)

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> Tensor | Drawn:
        """The logits `[S, V]`, which are the same in every process."""
        batch = dataclasses.replace(to_device(batch, self.device), draws=None)
        header, numbers = self._describe(batch)
        with self._section(("step", self._key, header)):
            distributed.broadcast(numbers, group=self._group, group_src=0)
            return self.inner.forward(batch)

    def _describe(self, batch: StepBatch) -> tuple[Header, Tensor]:
        tensors: list[Tensor] = []
        parts = [_without_tensors(batch, tensors), *(_without_tensors(group, tensors) for group in batch.groups)]
        numbers = torch.cat([t.reshape(-1).to(self.device, torch.int64) for t in tensors])
        requests = []
        for request in batch.requests:
            requests.append((request.arrival, len(request.prompt_ids), request.token_ids[self._told.get(request, 0) :]))
            self._told[request] = len(request.token_ids)
        forgotten, self._forgotten = self._forgotten, []
        return Header(parts[0], parts[1:], len(numbers), requests, forgotten), numbers


class FollowingRunner:
    """Another process's runner: computes its share of the steps that it is told."""

    def __init__(self, inner: Inner, group: Any) -> None:
        self.inner = inner
        self._group = group
        self._requests: dict[int, Request] = {}  # by the driver's arrival

    @torch.no_grad()
    def forward(self, header: Header) -> None:
        """One step, together with all other processes; the logits are the driver's to look at."""
        for arrival in header.forgotten:
            self.inner.forget(self._requests.pop(arrival))
        requests = [self._request(*told) for told in header.requests]
        numbers = torch.empty(header.count, dtype=torch.int64, device=self.inner.device)
        distributed.broadcast(numbers, group=self._group, group_src=0)
        pieces = iter(numbers.split([prod(p.shape) for part in (header.batch, *header.groups) for p in _places(part)]))
        batch = _with_tensors(header.batch, pieces)
        groups = [GroupBatch(**_with_tensors(part, pieces)) for part in header.groups]
        self.inner.forward(StepBatch(**batch, requests=requests, groups=groups))

    def _request(self, arrival: int, prompt_length: int, new_ids: list[int]) -> Request:
        """The driver's request as far as a runner looks at it."""
        request = self._requests.get(arrival)
        if request is None:
            request = Request(str(arrival), new_ids[:prompt_length], SamplingParams(max_new_tokens=1))
            request.token_ids = list(new_ids)
            self._requests[arrival] = request
        else:
            request.token_ids += new_ids
        return request


def _without_tensors(part: StepBatch | GroupBatch, tensors: list[Tensor]) -> dict[str, Any]:
    """The fields, but for requests and groups, with a place for each tensor."""
    names = [f.name for f in dataclasses.fields(part) if f.name not in ("requests", "groups")]
    fields = {name: getattr(part, name) for name in names}
    for name, value in fields.items():
        if isinstance(value, Tensor):
            tensors.append(value)
            fields[name] = _Place(tuple(value.shape), value.dtype, value.device.type)
    return fields


def _places(fields: dict[str, Any]) -> list[_Place]:
    return [value for value in fields.values() if isinstance(value, _Place)]


def _with_tensors(fields: dict[str, Any], pieces: Any) -> dict[str, Any]:
    """The fields with the tensors in their places."""

    def back(value: Any) -> Any:
        if not isinstance(value, _Place):
            return value
        piece = next(pieces)
        same_device = piece.device.type == value.device_type
        return piece.to(piece.device if same_device else value.device_type, value.dtype).view(value.shape)

    return {name: back(value) for name, value in fields.items()}
