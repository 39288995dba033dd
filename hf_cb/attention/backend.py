"""What an attention backend is: it owns the layout of a layer's keys and values, and computes attention over them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hf_cb.steps import GroupBatch, LayerFacts, StepBatch


class AttentionBackend(Protocol):
    """T query tokens of R requests are laid end to end, as in StepBatch.

    `storage` is whatever `allocate` returned: nobody else looks inside. Block 0 is never written.

    `device_types`: where it is chosen without being asked for by name, as torch calls them; None: anywhere.
    `block_multiple`: what block sizes must be a multiple of. `usual_block_size`: what they are if nobody gives one.
    `clears`: whether it reads past a request's length, so that `clear_blocks` has to be called.
    """

    name: str
    device_types: frozenset[str] | None
    block_multiple: int
    usual_block_size: int
    clears: bool

    def missing(self) -> str | None:
        """What this machine lacks for it, or None."""
        ...

    def unsupported(self, layer: LayerFacts) -> str | None:
        """Why this layer cannot be computed here, or None."""
        ...

    def block_bytes(self, layer: LayerFacts, block_size: int) -> int:
        """Bytes that one block of this layer takes."""
        ...

    def allocate(self, layer: LayerFacts, num_blocks: int, block_size: int) -> Any:
        """Storage of `num_blocks` blocks."""
        ...

    def graph_key(self, batch: StepBatch) -> Hashable:
        """What a step's launches depend on besides the shapes of its tensors: a captured step may be replayed for
        another one if both have the same. None: steps cannot be captured.

        For decodes it is the same whatever their lengths are. `prepare` is part of what is captured. Rows of padding
        are requests of one token with slot -1, which is written nowhere, seq_len 1 and a table of NULL_BLOCK.
        """
        ...

    def prepare(self, batch: StepBatch, group: GroupBatch, device: torch.device) -> Any:
        """What all layers of a group on a device share in a step, computed once: handed to `attend` as `meta`."""
        ...

    def attend(
        self, storage: Any, layer: LayerFacts, q: Tensor, k: Tensor, v: Tensor, meta: Any, sinks: Tensor | None
    ) -> Tensor:
        """Stores k `[T, Hkv, D]` and v `[T, Hkv, Dv]`, then attends with q `[T, Hq, D]`: returns `[T, Hq, Dv]`."""
        ...

    def tensors(self, storage: Any) -> list[Tensor]:
        """A storage's tensors, `[num_blocks, ...]` each; none where blocks are not rows."""
        ...

    def copy_blocks(self, storage: Any, pairs: Tensor) -> None:
        """Copies whole blocks, `[N, 2]` of source and destination; sources are read before any is written."""
        ...

    def clear_blocks(self, storage: Any, blocks: Tensor) -> None:
        """These blocks `[N]` get a new owner: their old content is dropped."""
        ...


def backends() -> dict[str, type[AttentionBackend]]:
    """The backends by name, on each kind of device the fastest first, and the most general one last."""
    from hf_cb.attention.cpu import CpuBackend
    from hf_cb.attention.flash import FlashBackend
    from hf_cb.attention.reference import ReferenceBackend
    from hf_cb.attention.torch_varlen import TorchVarlenBackend
    from hf_cb.attention.triton import TritonBackend

    return {
        "flash": FlashBackend,
        "triton": TritonBackend,
        "torch_varlen": TorchVarlenBackend,
        "cpu": CpuBackend,
        "reference": ReferenceBackend,
    }
