"""How one engine step borrows a model's attention without changing the model or its config.

transformers looks its attention and mask functions up in two registries. Both look-ups are wrapped once and are inert
unless the context variable `_STEP` holds a step, which only `stepping` sets. During a step
- mask functions build no mask: they return an empty tensor that carries which keys the mask would have shown (some
  families tell a layer's window by the mask alone);
- attention goes to the step, which computes it over the paged KV cache.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_cb.errors import IncompatibleTransformersError, UnsupportedModelError

# Arguments that models hand through to their attention and that change nothing in it
_NEUTRAL_ARGUMENTS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
    | {"output_router_logits", "position_embeddings", "layer_idx", "logits_to_keep", "is_causal", "implementation"}
)


@dataclass(frozen=True)
class AttentionCall:
    """What an attention call says besides q, k and v."""

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


class StepAttention(Protocol):
    """Computes the attention of one step: q `[T, Hq, D]`, k `[T, Hkv, D]`, v `[T, Hkv, Dv]` -> `[T, Hq, Dv]`."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, sinks: Tensor | None
    ) -> Tensor: ...


_STEP: ContextVar[StepAttention | None] = ContextVar("hf_cb_step", default=None)


@contextmanager
def stepping(step: StepAttention) -> Iterator[None]:
    """Inside, attention in this thread goes to `step`. Needs `install()`."""
    mark = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(mark)


# ---------------------------------------------------------------------------------------------------------- attention


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: q `[1, Hq, T, D]`, k and v `[1, Hkv, T, D]` -> `[1, T, Hq, Dv]`."""
    step = _STEP.get()
    assert step is not None, "only reached during a step"
    spec = _spec_of(module, attention_mask, others.get("is_causal"))
    for name, given in others.items():
        if given is not None and name not in _NEUTRAL_ARGUMENTS:
            raise UnsupportedModelError(
                f"{type(module).__name__} calls attention with {name}=, which is not supported."
            )
    window = spec.window if sliding_window is None else min(sliding_window, spec.window or sliding_window)
    call = AttentionCall(
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=window,
        chunk=spec.chunk,
        softcap=softcap,
        has_sinks=s_aux is not None,
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return step.attend(module, q, k, v, call, s_aux)[None], None


# -------------------------------------------------------------------------------------------------------------- masks


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
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, MaskMark):
            out.spec = next((a.spec for a in args if isinstance(a, MaskMark)), None)
        return out


def _spec_of(module: nn.Module, mask: Tensor | None, is_causal: bool | None) -> MaskSpec:
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


def _mark(*, mask_function: Callable[..., Any], device: Any = None, **_: Any) -> MaskMark:
    """Stands in for transformers' mask builders (`sdpa_mask` and its like) during a step."""
    return MaskMark.of(getattr(mask_function, "hf_cb_spec", None), device or "cpu")


def _with_spec(make: Callable[..., Any], spec: Callable[..., MaskSpec | None]) -> Callable[..., Any]:
    """`make`, whose result also carries the spec computed from the same arguments."""

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        made.hf_cb_spec = spec(*args, **kwargs)
        return made

    return wrapped


def _intersection(*masks: Any) -> MaskSpec | None:
    windows, chunks = set(), set()
    for mask in masks:
        spec = getattr(mask, "hf_cb_spec", None)
        if spec is None:
            return None
        windows |= {spec.window} - {None}
        chunks |= {spec.chunk} - {None}
    return MaskSpec(min(windows, default=None), min(chunks, default=None)) if len(chunks) < 2 else None


# ------------------------------------------------------------------------------------------------------- installation

_lock = threading.RLock()  # a garbage collection inside may end in uninstall()
_users = 0
_originals: list[tuple[Any, str, Any]] = []


def missing() -> list[str]:
    """What this file wraps and the installed transformers does not have."""
    from transformers import masking_utils, modeling_utils

    wanted = [(masking_utils, n) for n in ("causal_mask_function", "and_masks", "sliding_window_overlay")]
    wanted += [(masking_utils, n) for n in ("chunked_overlay", "packed_sequence_mask_function")]
    wanted += [(masking_utils, "AttentionMaskInterface"), (modeling_utils, "AttentionInterface")]
    gone = [f"{owner.__name__}.{name}" for owner, name in wanted if not hasattr(owner, name)]
    if not hasattr(getattr(modeling_utils, "AttentionInterface", None), "get_interface"):
        gone.append("transformers.modeling_utils.AttentionInterface.get_interface")
    return gone


def install() -> None:
    """Wraps the look-ups; counted, so that each `install` wants one `uninstall`.

    Raises:
        IncompatibleTransformersError: this transformers lacks something that is wrapped; the message names it.
    """
    global _users
    with _lock:
        if _users == 0 and (gone := missing()):
            raise IncompatibleTransformersError(f"This transformers lacks {', '.join(gone)}.")
        _users += 1
        if _users == 1:
            _wrap_all()


def uninstall() -> None:
    """Gives back what `install` took; with the last user gone, transformers is exactly as before."""
    global _users
    with _lock:
        if _users == 0:
            raise RuntimeError("uninstall() without install()")
        _users -= 1
        while _users == 0 and _originals:
            owner, name, original = _originals.pop()
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@contextmanager
def installed() -> Iterator[None]:
    """`install` and `uninstall` around a block."""
    install()
    try:
        yield
    finally:
        uninstall()


_ABSENT = object()


def _replace(owner: Any, name: str, new: Any) -> None:
    _originals.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, new)


def _wrap_all() -> None:
    from transformers import masking_utils as masks
    from transformers.modeling_utils import AttentionInterface

    look_up_attention = AttentionInterface.get_interface
    look_up_mask = masks.AttentionMaskInterface.__getitem__

    @functools.wraps(look_up_attention)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return _attention if _STEP.get() is not None else look_up_attention(self, attn_implementation, default)

    @functools.wraps(look_up_mask)
    def __getitem__(self: Any, key: str) -> Callable[..., Any]:
        return _mark if _STEP.get() is not None else look_up_mask(self, key)

    _replace(AttentionInterface, "get_interface", get_interface)
    _replace(masks.AttentionMaskInterface, "__getitem__", __getitem__)
    _replace(masks.causal_mask_function, "hf_cb_spec", MaskSpec())
    _replace(
        masks, "sliding_window_overlay", _with_spec(masks.sliding_window_overlay, lambda size: MaskSpec(window=size))
    )
    _replace(masks, "chunked_overlay", _with_spec(masks.chunked_overlay, lambda size, *_, **__: MaskSpec(chunk=size)))
    _replace(masks, "and_masks", _with_spec(masks.and_masks, _intersection))
    # within one request of a step positions rise by one, so a packed mask adds nothing to what it overlays
    packed = masks.packed_sequence_mask_function
    _replace(masks, "packed_sequence_mask_function", _with_spec(packed, lambda _: MaskSpec()))
    if remap := getattr(masks, "remap_positions_for_packed_sequence", None):  # from 5.24 on
        remapped = _with_spec(remap, lambda mask_function, _: getattr(mask_function, "hf_cb_spec", None))
        _replace(masks, "remap_positions_for_packed_sequence", remapped)
