"""Tile sizes of the paged attention kernels, for the launcher and for builds ahead of time alike."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

MOST_DIM = 256  # of a head


@dataclass(frozen=True)
class Shape:
    """What a layer's compiled kernels depend on."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    dim: int
    v_dim: int
    group: int  # query heads of a KV head
    page: int
    softcap: bool = False


@dataclass(frozen=True)
class Config:
    """Query rows and keys of a tile, warps of a program, stages of the pipeline that loads keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        return dict(num_warps=self.num_warps, num_stages=self.num_stages)


@dataclass(frozen=True)
class Device:
    num_sms: int
    shared_memory: int  # bytes that one program may use


@functools.cache
def padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


@functools.cache
def device_facts(device: torch.device) -> Device:
    """Under Triton's interpreter, on a CPU, a small device."""
    if device.type == "cpu":
        return Device(4, 99 * 1024)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return Device(properties["multiprocessor_count"], properties["max_shared_mem"])


@functools.cache
def config_for(shape: Shape, rows: int, shared_memory: int) -> Config:
    """For requests of up to `rows` query rows (tokens times query heads of a KV head).

    Decode tiles are as high as the tensor cores' smallest, and about 16 KiB of keys wide: with two in flight three
    programs fit a multiprocessor of 227 KiB. Tiles of prompts are as large as their accumulator leaves registers for,
    by the registers and spills of builds for sm_80, sm_90 and sm_100.
    """
    dim_pad, v_dim_pad = padded(shape.dim), padded(shape.v_dim)
    width = max(dim_pad, v_dim_pad)
    wide = shared_memory >= 200 * 1024  # sm_90, sm_100: operands come from shared or tensor memory, not from registers
    if shape.dtype == torch.float32:  # no tensor cores: products take registers
        block_m, num_warps = (16, 4) if rows <= 16 else (32, 8)
        block_n = 32 if width <= 64 else 16
    elif rows <= 32:
        block_m = 16 if rows <= 16 else 32
        num_warps = 8 if block_m == 32 and width <= 128 and not wide else 4
        block_n = max(32, min(128, 8192 // width))
    else:
        roomy = width <= 128 or (wide and shape.kv_dtype == shape.dtype)
        block_m = 128 if rows > 64 and roomy else 64
        num_warps = 4 if block_m == 64 and width <= 128 else 8
        block_n = max(32, min(block_m, (8192 if wide else 4096) // width))
    copied = block_n * (dim_pad + v_dim_pad) * shape.kv_dtype.itemsize
    rest = (block_m * (dim_pad + block_n)) * shape.dtype.itemsize
    buffers = 3 if wide and block_m >= 64 else 2
    return Config(block_m, block_n, num_warps, 3 if rest + buffers * copied <= shared_memory else 2)


@functools.cache
def constexprs(shape: Shape, config: Config) -> dict[str, Any]:
    """Of the unified and the split kernel."""
    return dict(
        SOFTCAP=shape.softcap,
        GROUP=shape.group,
        PAGE=shape.page,
        DIM=shape.dim,
        V_DIM=shape.v_dim,
        DIM_PAD=padded(shape.dim),
        V_DIM_PAD=padded(shape.v_dim),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
    )


@functools.cache
def merge_constexprs(shape: Shape, config: Config) -> dict[str, Any]:
    v_dim_pad = padded(shape.v_dim)
    heads = min(4, triton.next_power_of_2(shape.group))
    return dict(
        GROUP=shape.group,
        V_DIM=shape.v_dim,
        V_DIM_PAD=v_dim_pad,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        HEADS=heads,
        PIECES=min(16, 4096 // (heads * v_dim_pad)),
    )
