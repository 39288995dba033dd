"""Recording what a device is told to do, to tell it again in one go (CUDA graphs)."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MakeCapture = Callable[[], "Capture"]
Work = TypeVar("Work")  # a tensor, or several

_recording = threading.Lock()  # PyTorch can do one at a time, of all models in the process

# Operators whose results have shapes or values that the host waits for
_VALUES = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "bincount"}
    | {"_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
)


class Capture(Protocol):
    """One recording. What `work` reads and writes must lie in the same place at every replay, and whatever Python
    decides in it is decided once."""

    def record(self, work: Callable[[], Work]) -> Work:
        """Runs `work`, which has been rehearsed, for the recording; the tensors that it returns hold the result of the
        latest replay."""
        ...

    def replay(self) -> None: ...


class CannotRecordError(RuntimeError):
    """Something in the work would be decided once and for all, and has to be decided each time."""


def rehearse(work: Callable[[], Any]) -> None:
    """Runs `work` before it is recorded: kernels are compiled, libraries set themselves up, and what cannot be recorded
    is found out. A CUDA graph that fails half-way leaves PyTorch's memory pools, streams and random numbers in a mess.

    Raises:
        CannotRecordError: it waits for the device, or takes something from the host.
    """
    with _Rehearsal():
        work()


class _Rehearsal(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (why := _obstacle(func, args, kwargs or {}, out)) is not None:
            raise CannotRecordError(f"{func} {why}")
        return out


def _obstacle(func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> str | None:
    """What keeps an operator out of a recording."""
    namespace, _, name = func._schema.name.partition("::")
    tensors = [x for x in tree_leaves([args, kwargs, out]) if isinstance(x, Tensor)]
    if namespace != "aten":
        return None
    if name in _VALUES or (name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3):
        return "waits for the device"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if masks and not (len(args) > 2 and args[2].numel() == 1):  # one value is filled in without counting places
            return "waits for the device, to count what a mask chooses"
    if name in ("_to_copy", "copy_") and len({t.device for t in tensors}) > 1:  # a recording is of one device
        return "copies from one device to another"
    if name == "lift_fresh" and out.device.type not in ("cpu", "meta"):
        return "brings a value from the host"
    return None


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """What is collected may wait for the device, or give its memory back, and that ends a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaCapture:
    """A CUDA graph. `pool`: the memory of all graphs of which only one runs at a time; they also share a `stream`, so
    that memory is found again."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool = pool
        self._stream = stream
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], Work]) -> Work:
        before, failure = torch.cuda.current_stream(self._stream.device), None
        # other threads may allocate meanwhile: what they do must not spoil the recording
        recorder = torch.cuda.graph(self._graph, self._pool, self._stream, capture_error_mode="thread_local")
        with _recording, _without_collector():
            try:
                with recorder:
                    try:
                        out = work()
                    except Exception as error:
                        failure = error  # what the end of the recording says then is that something has gone wrong
                        raise
            except Exception as error:
                torch.cuda.set_stream(before)  # the recorder leaves its own behind
                raise failure or error from None
        return out

    def replay(self) -> None:
        self._graph.replay()


def cuda_captures(device: torch.device) -> MakeCapture:
    """Makes captures on that device that share a pool of memory. When they make room for others, those want a new one:
    PyTorch may not have let go of the old one yet."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    return lambda: CudaCapture(pool, stream)
