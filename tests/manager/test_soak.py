"""`make soak`, shortened."""

from __future__ import annotations

import pytest
from soak import Soak


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("seed", [1, 2])
def test_a_short_soak(seed: int) -> None:
    assert Soak(400, seed).run(threads=8, loops=2) == []
