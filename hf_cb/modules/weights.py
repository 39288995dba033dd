"""Weights that live in packed matrices, and come back bit for bit as soon as anybody else looks at them.

A packed `Parameter` stays the same object with its shape, dtype and device; its memory is given up. Its class becomes
`PackedParameter` meanwhile, through which torch tells us of every use. A linear layer or an embedding without gradients
is computed on the packed matrix: so a model's own modules run fast, and nothing in them is replaced. Any other use
(reading, writing, copying, saving, moving, training) first puts the weights of the whole model back. A read that began
just before packing may see NaN; memory that somebody else holds (an older `state_dict`) stays theirs.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils.weak import WeakIdKeyDictionary

from hf_cb.kernels.cpu import library as lib
from hf_cb.kernels.cpu.linear import Columns
from hf_cb.modules.others import at_work, is_computing
from hf_cb.modules.packed_ops import PACKED

# what can be asked of a packed parameter without unpacking it
_FACTS = (
    "shape dtype device layout ndim requires_grad is_leaf grad grad_fn is_cuda is_meta is_sparse is_quantized itemsize"
)
_HARMLESS: set[Any] = {getattr(Tensor, name).__get__ for name in _FACTS.split()}
_HARMLESS |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__}
_HARMLESS |= {Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.requires_grad_}
_HARMLESS |= {torch.is_floating_point, torch.is_complex, torch.numel}

GIVE_BACK_BYTES = 2**25
PATIENCE_S = 2.0  # after which an operation of another thread is taken to have ended
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it

_lock = threading.RLock()
_marks = WeakIdKeyDictionary()  # parameter -> its mark, and the memory and version that it had when it was unpacked
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.RLock()))
logger = logging.getLogger("hf_cb")


class PackedParameter(nn.Parameter):
    """A Parameter whose values are in a packed matrix."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packed = PACKED.get(func)
        if packed is not None and (found := packed(*args, **kwargs)) is not None:
            return found
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _unpack_all_in((args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _unpack_all_in(self)
        return self.__deepcopy__(memo)  # of the class that it is now

    def __reduce_ex__(self, protocol: Any) -> Any:
        _unpack_all_in(self)
        return self.__reduce_ex__(protocol)


def is_packed(parameter: Tensor) -> bool:
    return type(parameter) is PackedParameter


def mark_of(parameter: Tensor) -> object:
    """Moves when a parameter is written to or gets other memory, and not when it is packed or unpacked."""
    known = _marks.get(parameter)
    if known is not None and is_packed(parameter):
        return known[0]
    mark = parameter.data_ptr(), -1 if parameter.is_inference() else parameter._version
    return known[0] if known is not None and known[1] == mark else mark


def forget_mark(parameter: Tensor) -> None:
    """A parameter that is not packed is as any other again."""
    if not is_packed(parameter):
        _marks.pop(parameter, None)


def _unpack_all_in(value: Any) -> None:
    if isinstance(value, PackedParameter):
        owner = value.__dict__.get("_hf_cb_packed")
        if owner is not None:
            owner.unpack(value)
    elif isinstance(value, dict):
        _unpack_all_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            _unpack_all_in(item)


class WeightsInUse(Exception):
    """Somebody computes with the weights right now."""


class Listener(Protocol):
    """Somebody who computes with packed weights."""

    def weights_unpacked(self) -> None:
        """They are in their Parameters again."""
        ...


class PackedWeights:
    """The packed weights of one model. A parameter belongs to at most one of these at a time.

    `unpacked` becomes True when the parameters have their values again; only a step that is still running uses the
    matrices then. `asked_for` is the parameter that somebody wanted to see.
    """

    def __init__(self, table: lib.Table, threads: int) -> None:
        self.table = table
        self.threads = threads
        self._process = os.getpid()
        self.unpacked = False
        self.unpacked_at = 0.0  # on time.monotonic()
        self.asked_for: nn.Parameter | None = None
        self._listeners: list[weakref.ref[Listener]] = []
        self._claimed: dict[int, nn.Parameter] = {}
        self._pieces: dict[int, list[tuple[Columns, int]]] = {}
        self._old: deque[tuple[float, Tensor, dict[int, tuple[int, int]]]] = deque()
        self._freed = 0  # bytes since the allocator was last asked to give them back

    @contextmanager
    def packing(self, model: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Around the `take` of these parameters. Who looks at one meanwhile waits, and then has all of them back.

        Raises WeightsInUse if another thread is in a forward of the model; after any error nothing is changed.
        """
        with _lock:
            claimed = {id(p): p for p in parameters}
            if any(is_packed(p) for p in claimed.values()):
                raise ValueError("Some of these parameters are packed already.")
            for key, parameter in claimed.items():
                mark = mark_of(parameter)
                self._claimed[key] = parameter
                _marks[parameter] = (mark, None)
                parameter.__dict__["_hf_cb_packed"] = self
                parameter.__class__ = PackedParameter
            try:
                if is_computing(model):  # and could not be told to wait, as it began before
                    raise WeightsInUse(f"Another thread is in a forward of this {type(model).__name__}.")
                yield
            except BaseException:
                self.unpack()
                raise
            finally:
                self.let_go()

    def tell(self, listener: Listener) -> None:
        """It is told once they are unpacked, if it is still there."""
        with _lock:
            known = [each for each in self._listeners if each() is not None and each() is not listener]
            self._listeners = [*known, weakref.ref(listener)]

    def take(self, parameter: nn.Parameter, pieces: Sequence[Columns]) -> None:
        """Packs a weight `[N, K]` into these columns, its rows in this order, and lets go of its memory."""
        if id(parameter) in self._pieces:
            raise ValueError("Two layers share this parameter.")
        rows, placed = 0, []
        with _plainly():
            values = parameter.data
            for columns in pieces:
                columns.pack(self.table, values[rows : rows + columns.columns], self.threads)
                placed.append((columns, rows))
                rows += columns.columns
            self._pieces[id(parameter)] = placed
            parameter.data = torch.full((), float("nan"), dtype=values.dtype, device="cpu").expand(values.shape)
            torch.autograd.graph.increment_version(parameter)  # a backward pass over its old values raises
        self._old.append((time.monotonic(), values, at_work()))
        del values
        self.let_go()

    def columns_of(self, parameter: Tensor) -> list[Columns]:
        """Where a weight lies, its rows in order; nothing once it is unpacked."""
        return [columns for columns, _ in self._pieces.get(id(parameter), ())]

    def unpack(self, asked_for: nn.Parameter | None = None) -> None:
        """Every parameter gets its values back. May be called from any thread, and again."""
        with _lock:
            if not self.unpacked:
                self.asked_for = asked_for
                if asked_for is not None:
                    logger.info("Weights are unpacked: somebody uses one of shape %s", tuple(asked_for.shape))
            for key, parameter in list(self._claimed.items()):
                self._restore(parameter, self._pieces.get(key))
                del self._claimed[key]  # only now: what failed for want of memory can be tried again
                self._pieces.pop(key, None)
            if not self.unpacked:
                self.unpacked, self.unpacked_at = True, time.monotonic()
            for reference in self._listeners:
                if (listener := reference()) is not None:
                    listener.weights_unpacked()
            self._listeners.clear()

    def _restore(self, parameter: nn.Parameter, placed: list[tuple[Columns, int]] | None) -> None:
        """What fails in the middle (no memory, an interrupt) is done again from the start next time."""
        mark = _marks[parameter][0]
        if placed is None:
            del _marks[parameter]
        else:
            threads = self.threads if os.getpid() == self._process else 1  # a fork has no pool
            with _plainly():
                rows, first = sum(c.columns for c, _ in placed), placed[0][0]
                values = torch.empty(rows, first.depth, dtype=first.packed.dtype, device="cpu")
                for columns, row in placed:
                    columns.unpack_into(self.table, values[row : row + columns.columns], threads)
                parameter.data = values
                _marks[parameter] = (mark, (values.data_ptr(), parameter._version))
            self._freed += values.nbytes
            self._give_back()
        parameter.__class__ = nn.Parameter  # the last thing: who looks before waits for the lock
        parameter.__dict__.pop("_hf_cb_packed", None)

    def let_go(self) -> None:
        """Frees what weights were, unless an operation of another thread may still read them."""
        while self._old:
            since, values, suspects = self._old[0]
            if suspects and time.monotonic() - since < PATIENCE_S and suspects.items() & at_work().items():
                break
            self._old.popleft()
            self._freed += values.nbytes
            del values
        self._give_back()

    def _give_back(self) -> None:
        """Freed weights lie between others, where the C library would keep them: half a model, by the end."""
        if self._freed >= GIVE_BACK_BYTES and _malloc_trim is not None:
            _malloc_trim(0)
            self._freed = 0


@contextmanager
def _plainly() -> Iterator[None]:
    """Nothing that a caller has switched on (modes, inference, gradients) has a say."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad(), no_modes():
        yield
