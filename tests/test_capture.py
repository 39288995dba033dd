"""What is refused before it is recorded, and how a recording on CUDA begins and fails; a real one needs a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_cb.models.recorded import capture
from hf_cb.models.recorded.capture import CannotRecordError, CudaCapture, cuda_captures, rehearse

X, MASK = torch.arange(6.0), torch.arange(6) > 2
FAR = torch.ones(3, device="meta")


def filled(mask: Tensor, value: Tensor) -> Tensor:
    x = X.clone()
    x[mask] = value
    return x


WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: X.sum().item(),
    "if": lambda: X if (X > 7).any() else MASK,
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(MASK),
    "mask": lambda: X[MASK],
    "values by mask": lambda: filled(MASK, X[3:]),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X),
    "repeats": lambda: X.repeat_interleave(MASK.long()),
    "to the device": lambda: X.to("meta"),
    "into the device": lambda: FAR.copy_(X[:3]),
}
DOES_NOT: dict[str, Callable[[], Any]] = {
    "one value by mask": lambda: filled(MASK, torch.tensor(5.0)),
    "indices": lambda: X[torch.tensor([1, 2])],
    "repeats of known length": lambda: X.repeat_interleave(MASK.long(), output_size=3),
    "another type": lambda: X.to(torch.bfloat16).topk(2),
    "masked_fill": lambda: X.masked_fill(MASK, 1.0).scatter(0, torch.tensor([0]), 2.0),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_not_recorded(name: str) -> None:
    with pytest.raises(CannotRecordError, match="aten.* (waits for|copies|brings)"):
        rehearse(WAITS[name])


@pytest.mark.parametrize("name", DOES_NOT)
def test_what_does_not_is(name: str) -> None:
    rehearse(DOES_NOT[name])


def test_a_copy_from_one_gpu_to_another_is_not_recorded() -> None:

    class Nothing(Tensor):
        """A tensor without memory, as there may be no GPU."""

        @classmethod
        def __torch_dispatch__(cls, *args: Any) -> Any:
            raise NotImplementedError

    first, same, second = (Tensor._make_wrapper_subclass(Nothing, (3,), device=f"cuda:{n}") for n in (0, 0, 1))
    copy = torch.ops.aten.copy_.default
    assert capture._obstacle(copy, (first, same), {}, first) is None
    assert capture._obstacle(copy, (second, first), {}, second) == "copies from one device to another"


class Cuda:
    """Of torch.cuda what a capture uses. Like PyTorch, a recording that fails ends with an error of its own, and leaves
    its stream behind."""

    def __init__(self) -> None:
        self.current, self.said = "default of cuda:1", []
        self.CUDAGraph = SimpleNamespace

    def current_stream(self, device: torch.device) -> str:
        return self.current

    def set_stream(self, stream: str) -> None:
        self.current = stream

    def graph_pool_handle(self) -> str:
        return f"pool {len(self.said)}"

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(device=device)

    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        cuda = self
        self.said.append((pool, stream.device, capture_error_mode))

        class Recorder:
            def __enter__(self) -> None:
                assert capture._recording.locked() and not gc.isenabled(), "one at a time in a process"
                self.before, cuda.current = cuda.current, stream

            def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
                if error is not None:
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.current = self.before

        return Recorder()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    monkeypatch.setattr(torch, "cuda", found)
    return found


def test_captures_share_pool_and_stream_on_the_models_device(cuda: Cuda) -> None:
    device = torch.device("cuda:1")
    make = cuda_captures(device)
    first, second = make(), make()
    assert first.record(lambda: X) is X and second.record(lambda: MASK) is MASK
    assert cuda.said == [("pool 0", device, "thread_local")] * 2 and first._stream is second._stream
    assert cuda_captures(device)()._pool != first._pool and cuda.current == "default of cuda:1" and gc.isenabled()


def test_a_recording_that_fails_says_why_and_gives_the_stream_back(cuda: Cuda) -> None:
    def work() -> Tensor:
        assert cuda.current != "default of cuda:1"
        raise ValueError("the reason")

    failing: CudaCapture = cuda_captures(torch.device("cuda:1"))()
    with pytest.raises(ValueError, match="the reason"):
        failing.record(work)
    assert cuda.current == "default of cuda:1" and not capture._recording.locked()
