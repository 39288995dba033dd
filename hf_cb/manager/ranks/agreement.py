"""What the ranks of a tensor-parallel model must have in common when they begin a public call.

Each says what it was called with, in digests, before anything is computed: a rank that is elsewhere in its script, that
still changes the weights, or was given other inputs, would otherwise get answers that are not its own, or spoil all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from array import array
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_cb.models.sharding import is_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_models: weakref.WeakKeyDictionary[PreTrainedModel, bytes] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Terms:
    """One rank's view of a call.

    Args:
        what: the call and its model, in words.
        model: of what the model has in common on all ranks.
        inputs, options: what it was called with; None for inputs that cannot be compared, or are left to rank 0.
        random: of torch's global generator, from which seeds are drawn.
    """

    what: str
    model: bytes
    inputs: bytes | None
    options: bytes | None
    random: bytes

    def conflict(self, rank: int, other: Terms) -> str | None:
        """What another rank was called with that rank 0, whose terms these are, was not."""
        if other.what != self.what:
            return (
                f"Rank {rank} calls {other.what} where rank 0 calls {self.what}: every rank has to make the same calls "
                f"in the same order."
            )
        if other.model != self.model:
            return (
                f"Rank {rank} calls {self.what} on another model than rank 0: every rank has to load the same models "
                f"and use them in the same order."
            )
        if None not in (self.inputs, other.inputs) and self.inputs != other.inputs:
            return (
                f"Rank {rank} calls {self.what} with other inputs than rank 0: all ranks compute the same, so give "
                f"them the same inputs, or None on all but rank 0."
            )
        if self.options != other.options:
            return (
                f"Rank {rank} calls {self.what} with other options than rank 0: all ranks compute the same, so give "
                f"them the same options."
            )
        return None


def terms_of(model: PreTrainedModel, what: str, inputs: Any = None, options: Any = None) -> Terms:
    return Terms(what, _digest_of_model(model), _digest(inputs), _digest(options), random_digest())


def random_digest() -> bytes:
    """Of torch's global generator."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()


def _digest(value: Any) -> bytes | None:
    """Of a value that is the same on each rank if they were given the same; None if that cannot be told: it is None, or
    gives its items only once."""
    if value is None or hasattr(value, "__next__"):
        return None
    found = hashlib.sha256()
    _add(found, value)
    return found.digest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, (str, int, float, bool, bytes, type(None), torch.dtype)):
        found.update(f"{value!r};".encode())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _add(found, (key, value[key]))
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)}:".encode())
        try:
            found.update(array("q", value).tobytes())  # token ids: most of what there is
        except (TypeError, OverflowError):
            for each in value:
                _add(found, each)
    elif isinstance(value, Set):
        _add(found, sorted(map(str, value)))
    elif isinstance(value, Tensor) or hasattr(value, "tolist"):
        _add(found, value.tolist())
    elif dataclasses.is_dataclass(value):
        _add(found, [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)])
    elif hasattr(value, "to_dict"):  # a GenerationConfig
        _add(found, value.to_dict())
    else:
        found.update(f"{type(value).__name__};".encode())  # a processor, say: they look no further


def _digest_of_model(model: PreTrainedModel) -> bytes:
    """Of its class, its config and the first and last of the weights that each rank has whole: two checkpoints of one
    architecture are told apart by their norms. As it was at its first call: it may be trained later."""
    known = _models.get(model)
    if known is None:
        config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
        found = hashlib.sha256()
        _add(found, (type(model).__name__, config))
        small = [p for p in model.parameters() if p.dim() == 1 and is_whole(p)]
        for parameter in small[:1] + small[-1:]:
            found.update(parameter.detach().float().cpu().numpy().tobytes())
        known = _models[model] = found.digest()
    return known
