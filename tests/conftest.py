"""Fixtures for all tests. transformers' own warnings about unusual options are not what these tests are about."""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # then Triton's kernels run in its interpreter; read when Triton is imported, which the next imports do
    os.environ["TRITON_INTERPRET"] = "1"

import transformers
from tiny_models import make_model, make_tokenizer

import hf_cb
from hf_cb.attention import interception

transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True, scope="session")
def loops_in_tritons_interpreter() -> None:
    """Triton 3.6 takes a loop's bounds from arrays of one element, which numpy 2.4 no longer makes whole numbers of."""
    if "TRITON_INTERPRET" not in os.environ or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    usual = interpreter._patch_lang_tensor

    def patch(tensor, scope) -> None:
        usual(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny models are fastest on one thread, and tests run side by side."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After every test: transformers as before, and no thread of ours."""
    yield
    hf_cb.unpatch()
    if interception._users:  # a model that is garbage by now may still hold it
        gc.collect()
    assert not interception._users, "a test left the interception installed"
    ours = [t for t in threading.enumerate() if t.name == "hf_cb"]
    for thread in ours:
        thread.join(5)
    assert not [t for t in ours if t.is_alive()], "a test left a manager running"


@pytest.fixture(scope="session")
def shared_llama() -> transformers.PreTrainedModel:
    """For tests that do not change it."""
    return make_model("Llama")


@pytest.fixture
def llama() -> transformers.PreTrainedModel:
    return make_model("Llama")


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def speaker(llama, tokenizer) -> Iterator[transformers.PreTrainedModel]:
    """A model that is accelerated, with a tokenizer."""
    yield hf_cb.accelerate(llama, tokenizer)
    hf_cb.restore(llama)


@pytest.fixture
def intercepted() -> Iterator[None]:
    """For engines that are driven without a manager, which would see to it."""
    with interception.installed():
        yield


@pytest.fixture
def patched() -> Iterator[None]:
    hf_cb.patch()
    yield
    hf_cb.unpatch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip elsewhere, with the reason."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
