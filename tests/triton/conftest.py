"""Triton's kernels run on the GPU where there is one, and elsewhere on the CPU under Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before its module is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        for item in items:
            if "tests/triton/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="triton is not installed"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
