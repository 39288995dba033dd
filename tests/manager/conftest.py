"""The manager that most of these tests talk to; a file may have a fixture of that name of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_cb import ContinuousBatchingManager


@pytest.fixture
def manager(patched, shared_llama) -> Iterator[ContinuousBatchingManager]:
    with shared_llama.continuous_batching_context_manager() as manager:
        yield manager
