"""Builds the Triton kernels ahead of time, for GPUs that need not be there, and prints what each takes.

    python tests/gpu_kernels/aot.py [80 90 100]

Each is built as its launcher would build it. Fails if a build for bfloat16 or float16 spills registers to memory, takes
more shared memory than the GPU has, or computes an address in 32 bits; spills for float32 are reported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_cb.kernels.triton import activation, kv_store, rms_norm, rope_store, sampling
from hf_cb.kernels.triton.paged_attention_builds import SHARED_MEMORY, Build, builds

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# of all that `builds` offers: kernel-dtype-cache dtype-dim-value dim-group-page-query tokens
ATTENTION = (
    "unified_kernel-bf16-bf16-128-128-4-16-4096",
    "unified_kernel-fp16-fp16-256-256-2-32-4096",
    "unified_kernel-fp32-fp32-128-128-4-16-4096",
    "unified_kernel-bf16-bf16-192-128-1-64-4096",
    "split_kernel-bf16-bf16-128-128-4-16-1",
    "split_kernel-bf16-bf16-64-64-8-16-1",
    "split_kernel-bf16-fp8e4nv-128-128-4-16-1",
    "merge_kernel-bf16-bf16-128-128-4-16-1",
)


@dataclass(frozen=True)
class Taken:
    """What a compiled kernel takes: registers and bytes of a thread, and bytes of shared memory of a program."""

    registers: int
    stack: int
    local: int
    shared: int
    narrow: int  # products of addresses in 32 bits

    @property
    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0


def others() -> Iterator[Build]:
    """The kernels beside attention, at a shape of a model with 4,096 hidden values and 32 heads of 128, 8 of KV."""
    norm = rms_norm.config_for(4096) | dict(IN_FP32=False)
    pointers = dict.fromkeys(("x", "weight", "residual", "out", "residual_out"), "*bf16")
    numbers = dict(rows="i32", heads=1, eps="fp32", offset="fp32")
    yield _build("rms_norm-bf16-4096", rms_norm.rms_norm_kernel, pointers | numbers, norm)

    rope = rope_store.config_for(32, 8, 128, 128, 128)
    rope |= dict(PAGE=16, INTERLEAVED=False, IN_FP32=False, COPY_REST=False)
    names = ("q", "k", "v", "cos", "sin", "q_weight", "k_weight", "q_out", "k_cache", "v_cache")
    types = dict.fromkeys(names, "*bf16") | dict(slot_mapping="*i64", k_scale=None, v_scale=None)
    types |= dict(eps="fp32", offset="fp32", stride_cos_pair=1, stride_sin_pair=1)
    yield _build("rope_store-bf16-32-8-128-norm", rope_store.rope_store_kernel, types, rope)

    types = dict.fromkeys(("k", "v", "k_cache", "v_cache"), "*bf16")
    types |= dict(slot_mapping="*i64", k_scale=None, v_scale=None)
    yield _build(
        "store_kv-bf16-8-128", kv_store.store_kv_kernel, types, kv_store.config_for(8, 128, 128) | dict(PAGE=16)
    )

    types = dict(gate_up="*bf16", out="*bf16", size="i32")
    yield _build("act_and_mul-bf16-14336", activation.act_and_mul_kernel, types, activation.config_for(14336, "silu"))

    types = dict(logits="*bf16", top_ks="*i32", seeds="*i64", positions="*i64", out="*i64", listed="*i16", vocab="i32")
    types |= dict.fromkeys(("temperatures", "top_ps", "min_ps", "logprobs"), "*fp32")
    yield _build("sample-bf16-128256", sampling.sample_kernel, types, sampling.config_for(128256))


def _build(name: str, fn: Any, types: dict[str, Any], config: dict[str, Any]) -> Build:
    options = {key: config.pop(key) for key in ("num_warps", "num_stages") if key in config}
    types = dict.fromkeys((n for n in fn.arg_names if n.startswith("stride_")), "i32") | types
    constants = config | {n: value for n, value in types.items() if not isinstance(value, str)}
    constants = {n: value for n, value in constants.items() if n in fn.arg_names}
    signature = {n: "constexpr" if n in constants else types[n] for n in fn.arg_names}
    aligned = [
        i
        for i, n in enumerate(fn.arg_names)
        if signature[n][0] in "*i" and not fn.params[i].do_not_specialize and n not in ("rows", "heads")
    ]
    return Build(name, fn, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned}, options)


def narrow_products(ttir: str) -> list[str]:
    """The 32-bit products with a stride in a kernel's intermediate code: a cache of 100 GiB has more elements."""
    strides = {name for name in re.findall(r"(%stride_\w+): i32", ttir) if not name.endswith("_scale")}
    found = []
    for line in ttir.splitlines():
        step = re.match(r"\s*(%[\w#]+)(?::\d+)? = (\S+) (.*)", line)
        if step is None:
            continue
        result, operation, rest = step.groups()
        of_stride = any(name in strides for name in re.findall(r"%[\w#]+", rest))
        if of_stride and operation in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
            strides.add(result)
        if of_stride and operation == "arith.muli" and re.search(r"\bi32|xi32>", rest):
            found.append(line.strip())
    return found


def compiled(build: Build, capability: int) -> Taken:
    source = ASTSource(fn=build.fn, signature=build.signature, constexprs=build.constexprs, attrs=build.attrs)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=build.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", printed)}
    narrow = len(narrow_products(kernel.asm["ttir"]))
    return Taken(found["REG"], found["STACK"], found["LOCAL"], kernel.metadata.shared, narrow)


def main(capabilities: list[int]) -> int:
    bad = count = 0
    print(f"triton {triton.__version__}: registers, bytes of stack, local and shared memory")
    for capability in capabilities:
        chosen = {build.name: build for build in builds(capability) if build.name in ATTENTION}
        missing = set(ATTENTION) - set(chosen)
        if missing:
            sys.exit(f"not among the launcher's own: {sorted(missing)}")
        for build in [*chosen.values(), *others()]:
            taken, count = compiled(build, capability), count + 1
            wrong = taken.shared > SHARED_MEMORY[capability] * 1024 or (taken.spills and "fp32" not in build.name)
            wrong |= taken.narrow > 0
            bad += wrong
            numbers = f"{taken.registers:4} {taken.stack:5} {taken.local:5} {taken.shared:7}"
            print(f"sm_{capability:<4}{build.name:46}{numbers}{'  WRONG' if wrong else ''}", flush=True)
    print(f"{count} builds, {bad} that spill, do not fit or address in 32 bits")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main([int(a) for a in sys.argv[1:]] or [80, 90, 100]))
