"""What stands in a mask's place during a step: which keys it would have shown, and nothing else.

Some families tell a layer's window or chunk by the mask alone, so the mask functions that transformers composes carry a
`MaskSpec` along, and the mask built from them is an empty tensor with that spec.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cb.errors import UnsupportedModelError


@dataclass(frozen=True)
class MaskSpec:
    """The keys that a causal mask shows: all, or those of a window, or those of the query's own chunk."""

    window: int | None = None
    chunk: int | None = None


class MaskMark(torch.Tensor):
    """An empty tensor in a mask's place. It keeps its spec when a model slices or moves it; None: an unknown mask."""

    spec: MaskSpec | None

    @classmethod
    def of(cls, spec: MaskSpec | None, device: Any) -> MaskMark:
        mark: MaskMark = torch.empty(1, 1, 0, 0, device=device).as_subclass(cls)
        mark.spec = spec
        return mark

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = super().__torch_function__(func, types, args, kwargs or {})
        except RuntimeError as error:
            name = getattr(func, "__name__", func)
            raise UnsupportedModelError(f"The model computes with its attention mask itself ({name}).") from error
        if isinstance(out, MaskMark):
            out.spec = next((a.spec for a in args if isinstance(a, MaskMark)), None)
        return out


def spec_of(module: nn.Module, mask: Tensor | None, is_causal: bool | None) -> MaskSpec:
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal:
        raise UnsupportedModelError(f"{type(module).__name__} is not causal: it cannot generate with a KV cache.")
    if mask is None:
        return MaskSpec()
    spec = mask.spec if isinstance(mask, MaskMark) else None
    if spec is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} brings an attention mask that is neither causal, sliding nor chunked."
        )
    return spec


def mark(*, mask_function: Callable[..., Any], device: Any = None, **_: Any) -> MaskMark:
    """Stands in for transformers' mask builders (`sdpa_mask` and its like) during a step."""
    return MaskMark.of(getattr(mask_function, "hf_cb_spec", None), device or "cpu")


def with_spec(make: Callable[..., Any], spec: Callable[..., MaskSpec | None]) -> Callable[..., Any]:
    """`make`, whose result also carries the spec computed from the same arguments."""

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        made.hf_cb_spec = spec(*args, **kwargs)
        return made

    return wrapped


def intersection(*masks: Any) -> MaskSpec | None:
    windows, chunks = set(), set()
    for mask in masks:
        spec = getattr(mask, "hf_cb_spec", None)
        if spec is None:
            return None
        windows |= {spec.window} - {None}
        chunks |= {spec.chunk} - {None}
    return MaskSpec(min(windows, default=None), min(chunks, default=None)) if len(chunks) < 2 else None


NOTHING = MaskSpec(window=0)  # shows no key: an overlay for images, in a prompt without any


def union(*masks: Any) -> MaskSpec | None:
    """The spec of masks of which a query sees what any of them shows: known if all but one show nothing."""
    specs = [getattr(mask, "hf_cb_spec", None) for mask in masks]
    shown = [spec for spec in specs if spec != NOTHING]
    return shown[0] if len(shown) == 1 else None
