"""The compiled CPU kernels: found, loaded through ctypes, and the variant for this processor chosen.

The structs mirror `api.h`. Calls release the GIL (ctypes does so for plain C functions). Nothing here raises at import;
`library()` is None where no library was built.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "libhf_cb_cpu.so"
ELSEWHERE = "HF_CB_CPU_LIBRARY"  # names a file to load in its place: one built with sanitizers, or by another compiler
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu_erf": 2, "relu": 3, "relu2": 4}
NO_MEMORY, BAD_TOKEN = 1, 2


class Linear(Structure):
    _fields_ = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int64),
        ("depth", c_int64),
        ("first_column", c_int64),
        ("panel_stride", c_int32),
        ("panel_offset", c_int32),
    ]


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("centred", c_int32)]


class Attention(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((name, c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        ("out", c_void_p),
        ("out_token", c_int64),
        *((name, c_void_p) for name in ("k_cache", "v_cache", "k_scales", "v_scales", "sinks")),
        *((name, c_void_p) for name in ("slots", "block_table", "cu_seqlens", "seq_lens")),
        *((name, c_int64) for name in ("num_requests", "max_blocks", "num_blocks")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "dim", "v_dim", "block_size", "window", "chunk")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("dtype", "kv_dtype")),
    ]


class Layer(Structure):
    _fields_ = [
        *(
            (name, Norm)
            for name in (
                "input_norm",
                "post_attention_norm",
                "pre_mlp_norm",
                "post_mlp_norm",
                "q_norm",
                "k_norm",
            )
        ),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
        ("attention", Attention),
        ("cos", c_void_p),
        ("sin", c_void_p),
        *((name, c_int32) for name in ("rotary_dim", "rotary_interleaved", "norm_whole", "activation", "gated")),
        *((name, c_int32) for name in ("parallel", "group")),
        ("residual_multiplier", c_float),
    ]


class Model(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        *((name, c_int64) for name in ("num_layers", "hidden", "vocab", "num_groups")),
        ("embedding", c_void_p),
        ("final_norm", Norm),
        ("head", Linear),
        *((name, c_float) for name in ("embedding_multiplier", "logits_multiplier", "logits_softcap")),
        ("dtype", c_int32),
    ]


class Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ids", "positions", "rows", "cu_seqlens", "seq_lens")),
        *((name, c_void_p) for name in ("slots", "block_tables", "max_blocks")),
        *((name, c_int64) for name in ("num_tokens", "num_rows", "num_requests")),
        *((name, c_void_p) for name in ("hidden_in", "hidden_out", "logits", "best")),
    ]


class Draw(Structure):
    _fields_ = [
        ("row", c_int64),
        *((name, c_double) for name in ("uniform", "top_p", "min_p")),
        ("top_k", c_int64),
        ("temperature", c_float),
        *((name, c_int32) for name in ("greedy", "logprobs")),
        ("token", c_int64),
        ("logprob", c_double),
        ("kept", c_int64),
        *((name, c_void_p) for name in ("repeated", "banned", "added", "amounts")),
        *((name, c_int64) for name in ("num_repeated", "num_banned", "num_added")),
        ("repetition", c_float),
    ]


_SIGNATURES: dict[str, tuple[Any, ...]] = {  # of api.h's Table, in its order: what it returns, what it takes
    "pack": (None, c_int32, c_void_p, c_int64, c_int64, c_int64, c_int32, c_int32, c_void_p, c_int32, c_int32),
    "linear": (c_int32, c_void_p, c_int32, c_void_p, c_int64, c_int64, POINTER(Linear), c_void_p, c_int64, c_int32),
    "embed": (None, c_int32, POINTER(Linear), c_void_p, c_int64, c_void_p, c_int32),
    "attend": (c_int32, c_void_p, POINTER(Attention), c_int32),
    "step": (c_int32, c_void_p, POINTER(Model), POINTER(Step), c_int32),
    "sample": (c_int32, c_void_p, c_void_p, c_int64, c_int64, POINTER(Draw), c_int64, c_int32),
}


class Table:
    """One variant's functions, by the names of `api.h`."""

    pack: Any
    linear: Any
    embed: Any
    attend: Any
    step: Any
    sample: Any

    def __init__(self, address: int) -> None:
        words = ctypes.cast(address, POINTER(c_void_p))
        name = ctypes.cast(words[0] or 0, c_char_p).value
        self.variant = (name or b"").decode()
        for i, (function, signature) in enumerate(_SIGNATURES.items()):
            setattr(self, function, ctypes.CFUNCTYPE(*signature)(words[i + 1] or 0))


class Library:
    """The loaded file and its variants, fastest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = ctypes.CDLL(str(path))
        self.file.hf_cb_table.restype = self.file.hf_cb_workspace.restype = c_void_p
        self.file.hf_cb_table.argtypes = [c_int32]
        self.file.hf_cb_workspace_free.argtypes = [c_void_p]
        for i, struct in enumerate((Linear, Norm, Attention, Layer, Model, Step, Draw)):
            if self.file.hf_cb_sizes(i) != ctypes.sizeof(struct):
                raise ImportError(f"{path} is of another version of hf_cb: install hf_cb again to build it anew.")
        self.variants: dict[str, Table] = {}
        while address := self.file.hf_cb_table(len(self.variants)):
            table = Table(address)
            self.variants[table.variant] = table

    @property
    def best(self) -> Table:
        return next(iter(self.variants.values()))


class Workspace:
    """Scratch memory that lasts from call to call; one caller at a time. `of`: None is the library in use."""

    def __init__(self, of: Library | None = None) -> None:
        of = of or library()
        assert of is not None, problem()
        self._free = of.file.hf_cb_workspace_free
        self.handle = of.file.hf_cb_workspace()

    def __del__(self) -> None:
        self._free(self.handle)


@functools.cache
def library() -> Library | None:
    """The library, or None where none was built or it does not load; `problem()` says which."""
    return _load()[0]


def problem() -> str | None:
    """Why there is no library."""
    return _load()[1]


@functools.cache
def _load() -> tuple[Library | None, str | None]:
    elsewhere = os.environ.get(ELSEWHERE)
    found = [Path(elsewhere)] if elsewhere else _built()
    if not found:
        return None, "it was not built: install hf_cb where there is a C++ compiler with OpenMP"
    try:
        return Library(found[0]), None
    except (OSError, ImportError, AttributeError) as error:
        return None, str(error)


def _built() -> list[Path]:
    package = importlib.import_module(__package__ or "hf_cb.kernels.cpu")
    # an editable install builds it in another folder of the same namespace
    return [path for folder in package.__path__ if (path := Path(folder) / NAME).exists()]


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's data lies, for a field of a struct. The caller keeps the tensor alive."""
    return None if tensor is None else tensor.data_ptr()


def check(status: int) -> None:
    """Raises what a kernel's status means."""
    if status == NO_MEMORY:
        raise MemoryError("No memory for the scratch buffers of hf_cb's CPU kernels.")
    if status == BAD_TOKEN:
        raise IndexError("A token id is outside of the model's vocabulary.")
    if status:
        raise ValueError(f"hf_cb's CPU kernels refused a call (status {status}).")
