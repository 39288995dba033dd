"""The variants of the CPU kernels that this processor runs, for tests of each."""

from __future__ import annotations

import pytest
import torch

from hf_cb.kernels.cpu import library as lib

LIBRARY = lib.library()
VARIANTS = list(LIBRARY.variants) if LIBRARY else ["none"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
needs_library = pytest.mark.skipif(LIBRARY is None, reason=f"no compiled kernels: {lib.problem()}")


def table_of(variant: str) -> lib.Table:
    assert LIBRARY is not None
    return LIBRARY.variants[variant]


def workspace() -> lib.Workspace:
    assert LIBRARY is not None
    return lib.Workspace(LIBRARY)
