"""A KV cache takes memory where something is written, and gives it back when its manager has ended."""

from __future__ import annotations

import gc
import os

import psutil
import pytest
import torch

import hf_cb
from hf_cb.kernels.lazy_zeros import NO_RESERVE, lazy_zeros

MIB = 2**20


def rss() -> int:
    return psutil.Process(os.getpid()).memory_info().rss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_only_what_is_written_takes_memory(dtype: torch.dtype) -> None:
    before = rss()
    cache = lazy_zeros(512, MIB // dtype.itemsize, dtype=dtype)
    assert cache.shape == (512, MIB // dtype.itemsize) and cache.dtype == dtype and cache.data_ptr() % 64 == 0
    cache[3] = 1
    assert rss() - before < 64 * MIB
    assert cache[3].sum(dtype=torch.float64) == MIB // dtype.itemsize and not cache[4].any() and not cache[511].any()
    del cache
    assert rss() - before < 32 * MIB


@pytest.mark.skipif(not NO_RESERVE, reason="the system has no such mappings")
def test_a_process_with_several_large_caches_can_fork() -> None:
    share = int(psutil.virtual_memory().total * 0.4)
    caches = [lazy_zeros(share, dtype=torch.int8) for _ in range(3)]
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and len(caches) == 3


def test_a_manager_that_has_ended_holds_nothing(shared_llama) -> None:
    """Without a garbage collection: its memory would otherwise stay for long."""
    model = hf_cb.accelerate(shared_llama)
    try:
        gc.collect()
        gc.disable()
        before = rss()
        for _ in range(3):
            with model.continuous_batching_context_manager(
                continuous_batching_config=hf_cb.EngineConfig(kv_budget="256MiB", attention="reference")
            ) as manager:
                for storage in manager.engine.runner.storages:
                    for tensor in manager.engine.runner.backend.tensors(storage):
                        tensor.fill_(0)
                manager.submit([1, 2, 3], max_new_tokens=3).result()
            del manager, storage, tensor
        assert rss() - before < 200 * MIB
    finally:
        gc.enable()
        hf_cb.restore(model)
