"""Launching on a device, and copies to it and back that do not make the host wait for what it is doing."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

STREAMED = ("cuda", "xpu")  # work is queued there, copies from and to pinned memory too; elsewhere a copy is just made


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, `device` is the current one: what asks for no other goes there. Triton launches on the current device's
    stream wherever the tensors are, a new thread's current device is the first one, and layers may lie on several.
    """
    return torch.get_device_module(device).device(device) if device.type in STREAMED else contextlib.nullcontext()


def finish(devices: Iterable[torch.device]) -> None:
    """What this thread has told them is done: another thread's stream does not wait for this one's."""
    for device in devices:
        if device.type in STREAMED:
            torch.get_device_module(device).current_stream(device).synchronize()


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor of the host's. From memory that is not pinned, it would begin when all that the device has
    been told is done, and the host would wait until then."""
    if device.type not in STREAMED or tensor.device.type != "cpu":  # `torch.set_default_device` may have put it there
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def sent_into(place: Tensor, tensor: Tensor) -> None:
    """The same to a place on the device that is there already, in one piece."""
    pinned = place.device.type in STREAMED
    place.copy_(tensor.pin_memory() if pinned else tensor, non_blocking=pinned)


def host_room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host's to which the device copies by itself, uninitialised.

    PyTorch's own pinned memory comes in powers of two, which for gigabytes is up to twice what was asked for.

    Raises:
        RuntimeError: the system does not let so much be pinned.
    """
    room = torch.empty(shape, dtype=dtype, device="cpu")
    if device.type not in STREAMED or not room.nbytes:
        return room
    if device.type != "cuda":
        return room.pin_memory()
    failure = int(torch.cuda.cudart().cudaHostRegister(room.data_ptr(), room.nbytes, 0))
    if failure:
        raise RuntimeError(f"{room.nbytes} bytes of host memory cannot be pinned (CUDA error {failure}).")
    weakref.finalize(room, _unpin, room.data_ptr(), device).atexit = False
    return room


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # it may still be copying
    torch.cuda.cudart().cudaHostUnregister(address)


def fetched(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Begins to copy tensors of one device to the host; the result waits for them (and for nothing that the device is
    told later) and gives them."""
    streamed = bool(tensors) and tensors[0].device.type in STREAMED
    there = [tensor.to("cpu", non_blocking=streamed, copy=True) for tensor in tensors]
    if not streamed:
        return lambda: there
    devices = torch.get_device_module(tensors[0].device)
    done = devices.Event()
    done.record(devices.current_stream(tensors[0].device))  # by itself it would take the current device's

    def wait() -> list[Tensor]:
        done.synchronize()
        return there

    return wait
