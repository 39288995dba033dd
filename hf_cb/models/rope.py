"""Rotary embeddings whose frequencies depend on the length of the sequence: each request as if it were alone.

transformers looks at the largest position of the whole batch and keeps what it finds in module buffers. Here the
module's forward is driven: tokens go in groups of equal length, to a copy of the module in its first state. With P
prompt tokens, `generate` computes the key at position p when the sequence has max(P, p + 1) tokens, and leaves it so.

- "dynamic" (NTK): beyond the original maximum every length has its own frequencies.
- "longrope": one set up to the original maximum, another beyond it. Models whose `prepare_inputs_for_generation` drops
  the cache at the crossing compute all keys again then: these have the length of the whole sequence.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from hf_cb.attention.interception import Drive
from hf_cb.core import Request
from hf_cb.errors import UnsupportedModelError
from hf_cb.models.device import device_of
from hf_cb.models.driving import cache_argument, check_drivable, name_arguments
from hf_cb.steps import StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STATIC = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
BY_LENGTH = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class Rule:
    """One kind of scaling: how the lengths of a request's tokens decide on the frequencies."""

    kind: str
    original: int
    restarts: bool = False  # all keys are computed again when the sequence outgrows `original`

    def lengths(self, request: Request, positions: np.ndarray) -> np.ndarray:
        """The length that decides for each position; 0 up to the original maximum."""
        if self.restarts:
            found = np.full_like(positions, len(request.token_ids))
        else:
            found = np.maximum(positions + 1, len(request.prompt_ids))
        beyond = found if self.kind == "dynamic" else self.original + 1
        return np.where(found > self.original, beyond, 0)

    def regime(self, request: Request) -> int:
        """Requests of different regimes have different keys at the same positions."""
        length = len(request.token_ids if self.restarts else request.prompt_ids)
        if length <= self.original:
            return 0
        return length if self.kind == "dynamic" else 1


class LengthDependentRope:
    """A model's rotary modules that look at the length, and what stands in for them during a step."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModelError for a combination that cannot be driven."""
        self.modules = rotary_by_length(model)
        self._fresh = {id(module): _first_state(module) for module in self.modules}
        self._rules = {id(module): dict(_rules(model, module)) for module in self.modules}
        self._all = sorted({rule for rules in self._rules.values() for rule in rules.values()}, key=repr)
        for module in self.modules:
            check_drivable(module)

    def regime(self, request: Request) -> tuple[int, ...]:
        return tuple(rule.regime(request) for rule in self._all)

    def drives(self, batch: StepBatch) -> dict[int, Drive]:
        """What runs in place of the modules' forward in this step."""
        groups = {rule: _groups(rule, batch) for rule in self._all}
        return {id(m): functools.partial(self._drive, m, groups) for m in self.modules}

    def _drive(
        self,
        module: nn.Module,
        groups: dict[Rule, list[tuple[int, Tensor]]],
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        call = name_arguments(type(module), args, kwargs)
        rule = self._rules[id(module)].get(call.get("layer_type"))
        if rule is None:
            return forward(**call)
        positions: Tensor = call["position_ids"]  # [..., T]
        whole: list[Tensor] = []
        for length, anywhere in groups[rule]:
            tokens = anywhere.to(positions.device)
            fresh = self._fresh[id(module)]
            reset(fresh)
            shown = positions[..., tokens]
            if length:  # one token more, whose position says how long the sequence is
                shown = torch.cat((shown, torch.full_like(shown[..., :1], length - 1)), dim=-1)
            found = fresh.forward(**call | {"position_ids": shown})
            parts = [found] if isinstance(found, Tensor) else list(found)  # each [..., tokens, D]
            whole = whole or [part.new_empty(*part.shape[:-2], positions.shape[-1], part.shape[-1]) for part in parts]
            for all_tokens, part in zip(whole, parts, strict=True):
                all_tokens[..., tokens, :] = part[..., : len(tokens), :]
        return whole[0] if len(whole) == 1 else tuple(whole)


def rotary_by_length(model: nn.Module) -> list[nn.Module]:
    """The rotary modules of a model whose frequencies depend on the length."""
    return [m for m in model.modules() if any(kind in BY_LENGTH for _, kind in _kinds(m))]


def first_crossing(model: PreTrainedModel) -> int | None:
    """The length from which on a sequence's frequencies are others; None if they never are.

    Raises UnsupportedModelError as the path that drives them.
    """
    found = (rule.original for module in rotary_by_length(model) for _, rule in _rules(model, module))
    return min(found, default=None)


def reset(module: nn.Module) -> None:
    """A rotary module back to its first state, as if it had never seen a long sequence."""
    for name in [n for n in (*module._buffers, *vars(module)) if n.endswith("original_inv_freq")]:
        first = getattr(module, name)
        module._buffers[name.replace("original_inv_freq", "inv_freq")] = first.clone()
    for name in [n for n in vars(module) if n.endswith("max_seq_len_cached")]:
        setattr(module, name, module.original_max_seq_len)


@contextmanager
def states_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Whatever happens to the modules inside, they are afterwards as before."""
    before = [(dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, (attributes, buffers) in zip(modules, before, strict=True):
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _first_state(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    vars(twin)["_buffers"] = dict(module._buffers)
    for name in ("forward", "_old_forward", "_hf_hook"):  # accelerate's, of the original
        vars(twin).pop(name, None)
    reset(twin)
    return twin


def _kinds(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    """Layer types (None: all) and their kinds of scaling."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        yield None, kinds
    elif isinstance(kinds, dict):
        yield from kinds.items()


def _rules(model: PreTrainedModel, module: nn.Module) -> Iterator[tuple[str | None, Rule]]:
    for layer_type, kind in _kinds(module):
        if kind == "dynamic":
            original = int(module.original_max_seq_len)
            if _drops_cache(model):
                raise UnsupportedModelError(f"{type(model).__name__} drops its cache, with dynamic rotary scaling.")
            yield layer_type, Rule(kind, original)
        elif kind == "longrope":
            parameters = module.config.rope_parameters
            original = (parameters if layer_type is None else parameters[layer_type])[
                "original_max_position_embeddings"
            ]
            yield layer_type, Rule(kind, original, restarts=_drops_cache(model))


class _FullCache(DynamicCache):
    """Says that it holds so many tokens."""

    length = 0

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, *_: Any) -> int:
        return self.length


def _drops_cache(model: PreTrainedModel) -> bool:
    """Whether the model starts again when the sequence outgrows its config's original maximum."""
    inputs, cache = _at_crossing(model)
    return cache is not None and not any(value is cache for value in inputs.values())


def forgets_prompt(model: PreTrainedModel) -> bool:
    """Whether it starts again with the last token alone: a defect of `generate` in some versions, which we do not share
    (all keys are computed again here)."""
    inputs, _ = _at_crossing(model)
    return _drops_cache(model) and inputs["input_ids"].shape[1] == 1


def _at_crossing(model: PreTrainedModel) -> tuple[dict[str, Any], _FullCache | None]:
    """What the model itself prepares for the first token behind its config's original maximum, and the cache it had."""
    original = getattr(model.config.get_text_config(), "original_max_position_embeddings", None)
    name = cache_argument(model.__class__, "prepare_inputs_for_generation")
    if not isinstance(original, int) or not name:
        return {}, None
    cache = _FullCache()
    cache.length = original
    ids = torch.zeros(1, original + 1, dtype=torch.long, device=device_of(model))
    inputs = model.prepare_inputs_for_generation(
        ids, attention_mask=torch.ones_like(ids), next_sequence_length=1, use_cache=True, **{name: cache}
    )
    return inputs, cache


def _groups(rule: Rule, batch: StepBatch) -> list[tuple[int, Tensor]]:
    """The step's tokens by the length that decides on their frequencies; 0 is up to the original maximum."""
    lengths = np.concatenate(
        [
            rule.lengths(request, np.arange(end - count, end))
            for request, count, end in zip(batch.requests, batch.query_lens_list, batch.seq_lens_list, strict=True)
        ]
    )
    return [(int(n), torch.from_numpy(np.flatnonzero(lengths == n))) for n in np.unique(lengths)]
