"""How paged attention is launched: which kernel, with which tiles, what is refused; and the benchmark's figures."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hf_cb.attention.trial import TALL
from hf_cb.kernels.triton import paged_attention as op
from hf_cb.kernels.triton.paged_attention_builds import SHARED_MEMORY, builds
from hf_cb.kernels.triton.paged_attention_config import Device, Shape, config_for

H200 = Device(132, 227 * 1024)
LLAMA = Shape(torch.bfloat16, torch.bfloat16, 128, 128, 4, 16)


def test_decodes_are_split_for_a_full_device() -> None:
    found = op.plan(LLAMA, H200, 32, 32, 8, 1, 8192)
    assert found.config == config_for(LLAMA, 4, H200.shared_memory)
    assert (found.config.block_m, found.config.block_n) == (16, 64)
    assert (found.tiles, found.num_splits) == (32, 6 * 132 // 8)
    assert found.workspace(8, 128) == ((99 + 32) * 8 * 16, (99 + 32) * 8 * 16 * 129)


@pytest.mark.parametrize(
    "num_tokens,num_requests,max_seqlen_q,max_keys,splits",
    [(32, 32, 1, 256, False), (4096, 32, 4096, 8192, False), (100, 2, 100, 8192, True), (320, 32, 10, 8192, True)],
    ids=["short tables", "prompts", "few tiles", "speculated"],
)
def test_what_is_split(num_tokens: int, num_requests: int, max_seqlen_q: int, max_keys: int, splits: bool) -> None:
    found = op.plan(LLAMA, H200, num_tokens, num_requests, 8, max_seqlen_q, max_keys)
    assert (found.num_splits > 1) == splits
    assert (found.workspace(8, 128)[1] > 0) == splits
    assert op.plan(LLAMA, H200, num_tokens, num_requests, 8, max_seqlen_q, max_keys, 7).num_splits == 7


def test_windows_bound_the_keys_that_a_split_is_for(device: torch.device) -> None:
    q, cache = torch.zeros(4, 4, 16, device=device), torch.zeros(9, 16, 2, 16, device=device)
    table = torch.zeros(4, 64, dtype=torch.int32, device=device)
    assert op.workspace_size(q, cache, cache, table, 1) > 0
    assert op.workspace_size(q, cache, cache, table, 1, window=100) == 0
    assert op.workspace_size(q, cache, cache, table, 1, chunk=100) == 0


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_builds_are_whole(capability: int) -> None:
    """Each names every argument, and gives a value to those without a type."""
    found = list(builds(capability))
    assert len({build.name for build in found}) == len(found)
    for build in found:
        assert list(build.signature) == build.fn.arg_names
        assert {n for n, t in build.signature.items() if t == "constexpr"} == build.constexprs.keys()
        assert all(build.signature[build.fn.arg_names[i]] != "constexpr" for (i,) in build.attrs)


def test_tiles_fit_small_devices() -> None:
    """Queries, probabilities and two stages of keys and values, in bytes."""
    for dim in (64, 128, 192, 256):
        shape = Shape(torch.bfloat16, torch.bfloat16, dim, dim, 4, 16)
        for rows in (4, 20, 64, 4096):
            config = config_for(shape, rows, 99 * 1024)
            width = 256 if dim > 128 else dim
            keys = 2 * config.block_n * width * 2 * (config.num_stages - 1)
            assert 2 * config.block_m * (width + config.block_n) + keys <= 99 * 1024


def test_a_trial_is_long_enough_for_the_largest_tiles() -> None:
    """What takes more than a device has raises when it is launched: then another backend is chosen, in time."""
    for shape in (LLAMA, dataclasses.replace(LLAMA, dtype=torch.float32), dataclasses.replace(LLAMA, dim=256)):
        for shared_memory in (99 * 1024, 227 * 1024):
            assert config_for(shape, TALL + 1, shared_memory) == config_for(shape, 10**6, shared_memory)


def arguments(device: torch.device) -> dict[str, Any]:
    """A small step that is accepted."""
    one = torch.ones(2, dtype=torch.int32, device=device)
    cache = torch.ones(2, 16, 2, 32, device=device)
    cu_seqlens_q = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    given = dict(q=torch.ones(2, 6, 32, device=device), k_cache=cache, v_cache=cache, block_table=one[:, None])
    return given | dict(cu_seqlens_q=cu_seqlens_q, seq_lens=one, max_seqlen_q=1, scale=1.0)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(window=0), "window is 0"),
        (dict(num_splits=-1), "num_splits is -1"),
        (dict(scale=-1.0), "scale is -1.0"),
        (dict(k_scale=torch.ones(1)), "only one of"),
        (dict(k_scale=torch.ones(3), v_scale=torch.ones(1)), "k_scale is"),
        (dict(seq_lens=torch.ones(2, dtype=torch.int64)), "seq_lens is torch.int64"),
        (dict(cu_seqlens_q=torch.ones(2, dtype=torch.int32)), "cu_seqlens_q is"),
        (dict(q=torch.ones(2, 5, 32)), "5 query heads are not a multiple of 2"),
        (dict(q=torch.ones(2, 6, 16)), "must agree"),
        (dict(q=torch.ones(2, 6, 64)[..., ::2]), "q has stride 2"),
        (dict(q=torch.ones(2, 6, 32, dtype=torch.float64)), "q is torch.float64"),
        (dict(q=torch.ones(2, 6, 32, dtype=torch.bfloat16)), "both caches in q's torch.bfloat16"),
        (dict(sinks=torch.ones(2)), "one for each of 6"),
        (dict(num_splits=4, workspace=torch.ones(3)), "workspace has 3"),
        (dict(out=torch.ones(2, 6, 16)), "out is"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(device: torch.device, changes: dict[str, Any], message: str) -> None:
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        op.paged_attention(**arguments(device) | moved)


def test_heads_that_are_too_large_are_refused(device: torch.device) -> None:
    cache = torch.ones(2, 16, 2, 320, device=device)
    changes = dict(q=torch.ones(2, 6, 320, device=device), k_cache=cache, v_cache=cache)
    with pytest.raises(ValueError, match="a head of 320 is larger than 256"):
        op.paged_attention(**arguments(device) | changes)


def test_no_requests_is_no_work(device: torch.device) -> None:
    given = arguments(device) | dict(q=torch.ones(0, 6, 32, device=device))
    assert op.paged_attention(**given).shape == (0, 6, 32)


def test_the_benchmark_s_paper_figures() -> None:
    bench = runpy.run_path(str(Path(__file__).with_name("bench_paged_attention.py")))
    case, paper = bench["Case"], bench["paper"]
    cached, token = 2 * 32 * 8192 * 8 * 128 * 2, 2 * 32 * 128 * 2  # keys and values of all requests; q and out
    assert paper(case("decode", [8192] * 32, [1] * 32)) == dict(
        bytes=cached + 32 * token, flops=4 * 32 * 8192 * 32 * 128
    )
    # positions 2, 3 and 4 see 3, 3 and 3 keys; together 5
    small = case("window", [5], [3], 4, 2, 16, window=3)
    assert paper(small) == dict(bytes=2 * 5 * 2 * 16 * 2 + 3 * 2 * 4 * 16 * 2, flops=4 * 9 * 4 * 16)
    for given in bench["CASES"]:
        assert all(count <= length for length, count in zip(given.lengths, given.counts, strict=True))
    given = bench["arguments"](case("small", [40, 7], [2, 7], 2, 1, 16), "cpu")
    assert (given["q"].shape, given["k_cache"].shape, given["block_table"].shape) == (
        (9, 2, 16),
        (4, 16, 1, 16),
        (2, 3),
    )
