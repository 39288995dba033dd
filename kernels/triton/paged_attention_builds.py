"""Builds ahead of time of the paged attention kernels, in the launcher's own configurations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_cb.kernels.triton.paged_attention_config import Shape, config_for, constexprs, merge_constexprs
from hf_cb.kernels.triton.paged_attention_split import merge_kernel, split_kernel
from hf_cb.kernels.triton.paged_attention_tile import UNSPECIALISED
from hf_cb.kernels.triton.paged_attention_unified import unified_kernel

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB for a program, by compute capability
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv"}
HEADS = [  # (dim, v_dim, query heads of a KV head, page, softcap, sinks)
    (64, 64, 8, 16, False, True),
    (80, 80, 1, 16, False, False),
    (128, 128, 4, 16, False, False),
    (128, 128, 4, 64, False, False),
    (192, 128, 1, 64, False, False),
    (256, 256, 2, 32, True, False),
]


@dataclass(frozen=True)
class Build:
    """Arguments of `ASTSource` and, in `options`, of `triton.compile`."""

    name: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]


def builds(capability: int = 90) -> Iterator[Build]:
    """Decodes, speculated tokens and prompts; head sizes, pages and options; bfloat16, float16, float32 and e4m3."""
    pairs = [(dtype, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    for dtype, kv_dtype in (*pairs, (torch.bfloat16, torch.float8_e4m3fn)):
        for dim, v_dim, group, page, softcap, sinks in HEADS:
            shape = Shape(dtype, kv_dtype, dim, v_dim, group, page, softcap)
            for tokens in (1, 5, 4096):
                yield from _variants(shape, sinks, tokens, capability)


def _variants(shape: Shape, sinks: bool, tokens: int, capability: int) -> Iterator[Build]:
    config = config_for(shape, tokens * shape.group, SHARED_MEMORY[capability] * 1024)
    names = (TYPES[shape.dtype], TYPES[shape.kv_dtype], shape.dim, shape.v_dim, shape.group, shape.page, tokens)
    for fn in (unified_kernel, split_kernel):
        constants = constexprs(shape, config)
        constants |= {} if sinks else dict(sinks=None)
        constants |= {} if shape.kv_dtype != shape.dtype else dict(k_scale=None, v_scale=None)
        yield _build(fn, names, shape, constants, config.options, capability)
    yield _build(merge_kernel, names, shape, merge_constexprs(shape, config), dict(num_warps=4), capability)


def _build(
    fn: Any,
    names: tuple[Any, ...],
    shape: Shape,
    constants: dict[str, Any],
    options: dict[str, int],
    capability: int,
) -> Build:
    cached = TYPES[shape.kv_dtype]
    if cached == "fp8e4nv" and capability < 89:
        cached = "i8"
    types = dict.fromkeys(("out", "q"), f"*{TYPES[shape.dtype]}")
    types |= dict(k_cache=f"*{cached}", v_cache=f"*{cached}", inner_scale="fp32", outer_scale="fp32")
    types |= dict.fromkeys(("partial", "partial_lse", "sinks", "k_scale", "v_scale"), "*fp32")
    types |= dict.fromkeys(("block_table", "cu_seqlens_q", "seq_lens"), "*i32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in fn.arg_names}
    aligned = [
        i
        for i, name in enumerate(fn.arg_names)
        if (signature[name][0] == "*" or name.startswith("stride_")) and name not in UNSPECIALISED
    ]
    attrs: dict[tuple[int, ...], list[list[Any]]] = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return Build("-".join(map(str, (fn.__name__, *names))), fn, signature, constants, attrs, options)
