"""Every operation launches on the device of its tensors: Triton by itself takes the thread's current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hf_cb.kernels.triton import activation, kv_store, paged_attention, rms_norm, rope_store, sampling

HEADS, CACHE = torch.ones(2, 4, 16), torch.zeros(3, 4, 4, 16)
SLOTS, ROWS = torch.tensor([4, 5]), torch.ones(2, 8)
ONES = torch.ones(2, dtype=torch.int64)


def attend(**options: Any) -> None:
    table, starts = torch.ones(2, 1, dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    paged_attention.paged_attention(HEADS, CACHE, CACHE, table, starts, starts[1:], 1, 1.0, **options)


def sample() -> None:
    options = dict(temperature=ROWS[:, 0].contiguous(), top_p=ROWS[:, 0].contiguous(), min_p=ROWS[:, 0].contiguous())
    sampling.sample(ROWS, top_k=ONES.int(), seeds=ONES, positions=ONES, **options)


OPERATIONS: list[tuple[Any, int, Callable[[], object]]] = [
    (activation, 1, lambda: activation.act_and_mul(ROWS)),
    (kv_store, 1, lambda: kv_store.store_kv(HEADS, HEADS, CACHE, CACHE, SLOTS)),
    (paged_attention, 1, lambda: attend(num_splits=1)),
    (paged_attention, 2, lambda: attend(num_splits=3)),
    (rms_norm, 1, lambda: rms_norm.rms_norm(ROWS, None, 1e-6)),
    (rope_store, 1, lambda: rope_store.rope_store(HEADS, HEADS, HEADS, *[ROWS] * 2, CACHE, CACHE, SLOTS)),
    (sampling, 1, lambda: sampling.argmax(ROWS)),
    (sampling, 1, sample),
]


@pytest.mark.parametrize(("module", "launches", "operation"), OPERATIONS)
def test_launches(module: Any, launches: int, operation: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    seen = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: seen.append(list(current))

    monkeypatch.setattr(module, "on", on)
    for name, value in list(vars(module).items()):
        if name.endswith("_kernel") and not isinstance(value, FunctionType):
            monkeypatch.setattr(module, name, Kernel())
    operation()
    assert seen == [[HEADS.device]] * launches


def test_every_operation_is_asked() -> None:
    """The files with kernels of their own, less those that others launch."""
    files = Path(activation.__file__).parent.glob("*.py")
    launching = {file.stem for file in files if "_kernel[" in file.read_text()}
    assert launching == {module.__name__.rpartition(".")[2] for module, _, _ in OPERATIONS}
