"""Recording what a device is told to do, to tell it again in one go (CUDA graphs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Capture(Protocol):
    """One recording. What `work` reads and writes must lie in the same place at every replay, and whatever Python
    decides in it is decided once."""

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        """Runs `work` for the recording; the tensor that it returns holds the result of the latest replay."""
        ...

    def replay(self) -> None: ...


class CudaCapture:
    """A CUDA graph. `pool`: the memory that all graphs of a model share, since only one runs at a time."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # libraries set themselves up and kernels are compiled outside of the recording
        torch.cuda.current_stream().wait_stream(stream)
        # other threads may allocate meanwhile: what they do must not spoil the recording
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        self._graph.replay()


def cuda_captures() -> Callable[[], Capture]:
    """Makes captures that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaCapture(pool)
