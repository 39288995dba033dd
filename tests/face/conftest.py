"""What tests of routed `generate` share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from routed import Ways
from tiny_models import make_model

import hf_cb


@pytest.fixture(scope="module")
def twin() -> Any:
    return make_model()


@pytest.fixture
def models(shared_llama, twin) -> Iterator[tuple[Any, Any]]:
    """A plain model, and an accelerated one with the same weights."""
    yield shared_llama, hf_cb.accelerate(twin, modules="off")
    hf_cb.restore(twin)


@pytest.fixture
def ways(caplog) -> Ways:
    return Ways(caplog)
