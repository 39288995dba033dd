"""The forward of a step, as the engine sees it (`models.paged.PagedModel` and `models.dense.DenseModel` are two)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hf_cb.core import Request
    from hf_cb.models.groups import LayerGroup
    from hf_cb.steps import Drawn, StepBatch


class Runner(Protocol):
    """Turns a StepBatch into logits, and keeps whatever that takes."""

    groups: list[LayerGroup]

    @property
    def shares_prefixes(self) -> bool:
        """Whether a request can start behind tokens that another has computed, and take drafted ones back: everything
        is in the blocks then."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether a step may be launched while the tokens of the one before it are unknown to the host: nothing but the
        input ids depends on them."""
        ...

    @property
    def scores_prompts(self) -> bool:
        """Whether it gives the logits of any row of a step, and not only of each request's last."""
        ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: StepBatch) -> Tensor | Drawn:
        """Logits `[S, V]`, or perhaps what `batch.draws` wants of them. The batch is the host's: it is sent from here
        (`models.sending`)."""
        ...

    def lend(self) -> None:
        """The model is somebody else's for a while (a pause): what it is made of must be as they know it."""
        ...

    def new_requests(self) -> None:
        """Requests wait to come in: the time to prepare what takes longer than a step."""
        ...

    def warm_up(self) -> None:
        """No request waits yet: the time for what makes the first steps slow."""
        ...

    def weights_key(self) -> object:
        """Changes when cached keys and values are no longer those of the weights."""
        ...

    def key_regime(self, request: Request) -> Hashable:
        """What a request's keys depend on besides its tokens (a regime of rotary scaling): those of different regimes
        share none, and when a request's moves, its keys are computed again."""
        ...

    def forget(self, request: Request) -> None:
        """It has ended or was preempted: state that is kept for it is of no use any more."""
        ...
