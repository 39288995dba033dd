"""The memory that a step takes is measured by running one that large."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_cb.models.warmup import working_bytes

pytestmark = pytest.mark.usefixtures("intercepted")


class Largest(TorchDispatchMode):
    """The largest single result of any operator, in bytes."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found = max([self.found, *(t.nbytes for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


@contextmanager
def largest(devices: Iterable[torch.device]) -> Iterator[Counter[torch.device]]:
    found: Counter[torch.device] = Counter()
    with Largest() as mode:
        yield found
    found[torch.device("cpu")] = mode.found


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Mistral"])
def test_grows_with_tokens_and_rows(family: str) -> None:
    model = make_model(family)
    small, tokens, rows = (
        working_bytes(model, n, r, largest)[torch.device("cpu")] for n, r in ((16, 1), (256, 1), (256, 256))
    )
    vocab = model.config.get_text_config().vocab_size
    assert small < tokens <= rows and rows >= 256 * vocab * 4


def test_a_cpu_is_not_measured() -> None:
    assert not working_bytes(make_model("Llama"), 8, 1)


def test_a_step_that_does_not_fit_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    @contextmanager
    def full(devices: Iterable[torch.device]) -> Iterator[Counter[torch.device]]:
        yield Counter()
        raise torch.OutOfMemoryError("no")

    caplog.set_level(logging.WARNING, "hf_cb")
    assert not working_bytes(make_model("Llama"), 8, 1, full)
    assert "max_batch_tokens" in caplog.text
