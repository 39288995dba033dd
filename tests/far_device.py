"""A GPU without a GPU: PyTorch's "meta" device, whose tensors have no values, and a host that may not wait for it.

What a step copies there and back, and whether it asks for a value, is as on a GPU.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_cb.kernels import device as module

DEVICE = torch.device("meta")
aten = torch.ops.aten
ASKS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}


class Waiting(Exception):
    """The host would wait until the device has done all that it was told."""


class Watch(TorchDispatchMode):
    """Counts the copies from and to the device; those for which the host would wait raise."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []
        self.copies = {"to": 0, "from": 0}
        self.events: list[str] = []  # on which stream
        self.current: list[torch.device] = []
        self.finished: list[str] = []  # streams that were waited for

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in ASKS and args[0].device == DEVICE:
            raise Waiting(f"{func} of a tensor there")
        if func is aten.index.Tensor and any(i is not None and i.device != args[0].device for i in args[1]):
            raise Waiting("indices of the host's")
        if func is aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            self._note(args[0], kwargs.get("non_blocking", False))
            if args[0].device == DEVICE:
                return torch.zeros_like(args[0], device="cpu", dtype=kwargs.get("dtype"))
        elif func is aten.copy_.default and args[0].device != args[1].device:
            self._note(args[1], args[2] if len(args) > 2 else False)
            if args[1].device == DEVICE and not self._is_pinned(args[0]):
                raise Waiting("a copy back to memory that is not pinned")
            if args[1].device == DEVICE:
                return args[0]
        return func(*args, **kwargs)

    def _note(self, source: Tensor, non_blocking: bool) -> None:
        back = source.device == DEVICE
        self.copies["from" if back else "to"] += 1
        if not non_blocking:
            raise Waiting(f"a copy {'back' if back else 'there'}")
        if not back and not self._is_pinned(source):
            raise Waiting("a copy from memory that is not pinned")

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == other.untyped_storage().data_ptr() for other in self.pinned)

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tensor)
        return tensor


@contextmanager
def far_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Inside, the device is as a GPU is, and waiting for it raises Waiting."""
    watch = Watch()
    event = types.SimpleNamespace(record=watch.events.append, synchronize=lambda: None)

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        watch.current.append(device)
        yield
        watch.current.pop()

    class Stream(str):
        def synchronize(self) -> None:
            watch.finished.append(str(self))

    def stream(device: torch.device) -> Stream:
        return Stream(device)

    devices = types.SimpleNamespace(Event=lambda: event, current_stream=stream, device=current)
    make = torch.tensor

    def tensor(data: Any, **options: Any) -> Tensor:
        if options.get("device") == DEVICE:  # which operators do not show
            raise Waiting("a tensor of the host's values")
        return make(data, **options)

    look_up = Tensor.__getitem__

    def look(self: Tensor, key: Any) -> Tensor:
        if self.device == DEVICE and any(isinstance(i, list) for i in (key if isinstance(key, tuple) else (key,))):
            raise Waiting("a list of the host's indices")
        return look_up(self, key)

    with monkeypatch.context() as patch, watch:
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(Tensor, "__getitem__", look)
        patch.setattr(module, "STREAMED", (DEVICE.type,))
        patch.setattr(Tensor, "pin_memory", lambda tensor: watch.pin(tensor))
        patch.setattr(torch, "get_device_module", lambda device: devices)
        yield watch


def move(model: nn.Module) -> None:
    """As `model.to(DEVICE)`, of the same modules."""
    for each in model.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=DEVICE), requires_grad=False)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = torch.empty_like(buffer, device=DEVICE)
