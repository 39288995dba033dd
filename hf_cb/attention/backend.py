"""What an attention backend is: it owns the layout of a layer's keys and values, and computes attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hf_cb.errors import OptionError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hf_cb.core import GroupBatch, LayerFacts, StepBatch


class AttentionBackend(Protocol):
    """Six methods; T query tokens of R requests are laid end to end, as in StepBatch.

    `storage` is whatever `allocate` returned: nobody else looks inside. Block 0 is never written.
    """

    name: str

    def unsupported(self, layer: LayerFacts) -> str | None:
        """Why this layer cannot be computed here, or None."""
        ...

    def block_bytes(self, layer: LayerFacts, block_size: int) -> int:
        """Bytes that one block of this layer takes."""
        ...

    def allocate(self, layer: LayerFacts, num_blocks: int, block_size: int) -> Any:
        """Storage of `num_blocks` blocks."""
        ...

    def prepare(self, batch: StepBatch, group: GroupBatch, device: torch.device) -> Any:
        """What all layers of a group on a device share in a step, computed once: handed to `attend` as `meta`."""
        ...

    def attend(
        self, storage: Any, layer: LayerFacts, q: Tensor, k: Tensor, v: Tensor, meta: Any, sinks: Tensor | None
    ) -> Tensor:
        """Stores k `[T, Hkv, D]` and v `[T, Hkv, Dv]`, then attends with q `[T, Hq, D]`: returns `[T, Hq, Dv]`."""
        ...

    def copy_blocks(self, storage: Any, pairs: Tensor) -> None:
        """Copies whole blocks, `[N, 2]` of source and destination; sources are read before any is written."""
        ...

    def clear_blocks(self, storage: Any, blocks: Tensor) -> None:
        """These blocks `[N]` get a new owner: a backend that reads past a request's length drops their old content."""
        ...


def backends() -> dict[str, type[AttentionBackend]]:
    """The backends by name, the fastest first and the most general one last."""
    from hf_cb.attention.cpu import CpuBackend
    from hf_cb.attention.reference import ReferenceBackend

    return {"cpu": CpuBackend, "reference": ReferenceBackend}


def choose_backend(
    name: str | None, layers: Sequence[LayerFacts], kv_dtype: str | None = None
) -> tuple[AttentionBackend, str]:
    """The backend for these layers and the reason: the one asked for, or the first that can do all of them.

    `kv_dtype`: what the cache is kept in, if not in the layers' own dtype.

    Raises:
        OptionError: the one asked for is unknown or cannot do a layer; the message says which and why.
    """
    known = backends()
    if name is not None and name not in known:
        raise OptionError(f"attention={name!r} is unknown; the backends are {', '.join(known)}.")
    if kv_dtype is not None:
        return _quantising(name, layers, kv_dtype), f"the one that keeps keys and values in {kv_dtype}"
    for candidate in [name] if name is not None else list(known):
        backend = known[candidate]()
        problem = _problem(backend, layers)
        if problem is None:
            return backend, "asked for" if name else "the first that can do all layers"
        if name is not None:
            raise OptionError(f"attention={name!r} cannot run this model: {problem}.")
    raise OptionError(f"No attention backend can run this model: {problem}.")


def _quantising(name: str | None, layers: Sequence[LayerFacts], kv_dtype: str) -> AttentionBackend:
    from hf_cb.attention.cpu import CpuBackend

    if name not in (None, CpuBackend.name):
        raise OptionError(f"kv_dtype={kv_dtype!r} needs attention='cpu', not {name!r}: leave one of the two unset.")
    backend = CpuBackend(kv_dtype)
    problem = _problem(backend, layers)
    if problem is not None:
        raise OptionError(
            f"kv_dtype={kv_dtype!r} needs the cpu backend, which cannot run this model: {problem}. "
            f"Leave kv_dtype unset."
        )
    return backend


def _problem(backend: AttentionBackend, layers: Sequence[LayerFacts]) -> str | None:
    return next((why for layer in layers if (why := backend.unsupported(layer)) is not None), None)
