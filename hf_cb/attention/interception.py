"""How one engine step borrows a model's attention without changing the model or its config.

transformers looks its attention and mask functions up in two registries. Both look-ups are wrapped once and are inert
unless the context variable `_STEP` holds a step, which only `stepping` sets. During a step
- mask functions build no mask: they return an empty tensor that carries which keys the mask would have shown;
- attention goes to the step, which computes it over the paged KV cache;
- modules that must see each request by itself (recurrent layers, some rotary embeddings) go to the step too: the
  `forward` of their class is wrapped, with the same inertness.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_cb.attention.masks import NOTHING, MaskSpec, intersection, mark, spec_of, union, with_spec
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


# Stands in for a module's forward: takes that forward (bound), and the arguments of the call
Drive = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Step(Protocol):
    """What one step does with the calls that reach it."""

    @property
    def drives(self) -> Mapping[int, Drive]:
        """By the id of a module: what runs in place of its forward."""
        ...

    @property
    def driven(self) -> set[int]:
        """The ids of those whose call has arrived."""
        ...

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, sinks: Tensor | None
    ) -> Tensor:
        """q `[T, Hq, D]`, k `[T, Hkv, D]`, v `[T, Hkv, Dv]` -> `[T, Hq, Dv]`."""
        ...


_STEP: ContextVar[Step | None] = ContextVar("hf_cb_step", default=None)


@contextmanager
def stepping(step: Step, modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Inside, attention in this thread goes to `step`, and so do calls of these modules. Needs `install()`."""
    with ExitStack() as hooked:
        for module in modules:
            if "_old_forward" in vars(module):
                hooked.enter_context(_under_hook(module))
            else:
                _wrap_forward(type(module))
        token = _STEP.set(step)
        try:
            yield
        finally:
            _STEP.reset(token)


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
    spec = spec_of(module, attention_mask, others.get("is_causal"))
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
    device = query.device.type
    # torch's own attention computes in autocast's dtype, whatever it is given; shapes alone (`hf-cb plan`) know none
    if device != "meta" and torch.is_autocast_enabled(device):
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return step.attend(module, q, k, v, call, s_aux)[None], None


# ------------------------------------------------------------------------------------------------------- installation

_lock = threading.RLock()  # a garbage collection inside may end in uninstall()
_users: set[object] = set()
_originals: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what we put there


def missing() -> list[str]:
    """What this file wraps and the installed transformers does not have."""
    from transformers import masking_utils, modeling_utils

    wanted = [(masking_utils, n) for n in ("causal_mask_function", "and_masks", "or_masks", "sliding_window_overlay")]
    wanted += [(masking_utils, n) for n in ("chunked_overlay", "packed_sequence_mask_function")]
    wanted += [(masking_utils, "AttentionMaskInterface"), (modeling_utils, "AttentionInterface")]
    gone = [f"{owner.__name__}.{name}" for owner, name in wanted if not hasattr(owner, name)]
    if not hasattr(getattr(modeling_utils, "AttentionInterface", None), "get_interface"):
        gone.append("transformers.modeling_utils.AttentionInterface.get_interface")
    return gone


def install(user: object) -> None:
    """Wraps the look-ups until this user, and all others, have called `uninstall`.

    Users are named, not counted: one that is interrupted in the middle just calls `uninstall`, whatever had been done.

    Raises:
        IncompatibleTransformersError: this transformers lacks something that is wrapped; the message names it.
    """
    with _lock:
        first = not _users
        if first:
            _unwrap_all()  # what an interrupted uninstall() has left
            if gone := missing():
                raise IncompatibleTransformersError(f"This transformers lacks {', '.join(gone)}.")
        _users.add(user)
        if first:
            _wrap_all()


def uninstall(user: object) -> None:
    """Takes back this user's `install`, if there was one; with the last gone, transformers is exactly as before."""
    with _lock:
        _users.discard(user)
        if not _users:
            _unwrap_all()


@contextmanager
def installed() -> Iterator[None]:
    """`install` and `uninstall` around a block."""
    user = object()
    try:
        install(user)
        yield
    finally:
        uninstall(user)


_ABSENT = object()


def _replace(owner: Any, name: str, new: Any) -> None:
    _originals.append((owner, name, vars(owner).get(name, _ABSENT), new))
    setattr(owner, name, new)


def _unwrap_all() -> None:
    while _originals:
        owner, name, original, ours = _originals[-1]
        if vars(owner).get(name, _ABSENT) is ours:  # else somebody else has replaced it since
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        _originals.pop()


def _wrap_forward(cls: type[nn.Module]) -> None:
    if getattr(vars(cls).get("forward"), "hf_cb_driven", False):
        return
    forward = cls.forward  # the class's own, or what somebody has put in its place

    @functools.wraps(forward)
    def driven(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call(self, functools.partial(forward, self), args, kwargs)

    driven.hf_cb_driven = True  # type: ignore[attr-defined]
    with _lock:
        if not _users:
            raise RuntimeError("stepping() without install()")
        if not getattr(vars(cls).get("forward"), "hf_cb_driven", False):
            _replace(cls, "forward", driven)


@contextmanager
def _under_hook(module: Any) -> Iterator[None]:
    """accelerate gives a module a forward of its own, which loads the weights and calls `_old_forward`."""
    forward = module._old_forward
    module._old_forward = lambda *args, **kwargs: _call(module, forward, args, kwargs)
    try:
        yield
    finally:
        module._old_forward = forward


def _call(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A driven module is called: its drive runs, if this thread is in a step, and else its own forward."""
    step = _STEP.get()
    drive = step.drives.get(id(module)) if step is not None else None
    if step is None or drive is None:
        return forward(*args, **kwargs)
    step.driven.add(id(module))
    token = _STEP.set(None)  # inside, everything is as outside of a step
    try:
        return drive(forward, args, kwargs)
    finally:
        _STEP.reset(token)


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
        return mark if _STEP.get() is not None else look_up_mask(self, key)

    _replace(AttentionInterface, "get_interface", get_interface)
    _replace(masks.AttentionMaskInterface, "__getitem__", __getitem__)
    _replace(masks.causal_mask_function, "hf_cb_spec", MaskSpec())
    _replace(
        masks, "sliding_window_overlay", with_spec(masks.sliding_window_overlay, lambda size: MaskSpec(window=size))
    )
    _replace(masks, "chunked_overlay", with_spec(masks.chunked_overlay, lambda size, *_, **__: MaskSpec(chunk=size)))
    _replace(masks, "and_masks", with_spec(masks.and_masks, intersection))
    _replace(masks, "or_masks", with_spec(masks.or_masks, union))
    if blocks := getattr(masks, "blockwise_overlay", None):  # not in every version
        images = with_spec(blocks, lambda ids: None if bool((ids >= 0).any()) else NOTHING)
        _replace(masks, "blockwise_overlay", images)
    find_packed = masks.find_packed_sequence_indices

    @functools.wraps(find_packed)
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        # not asked in a step, where it would make the host wait for the device
        return None if _STEP.get() is not None else find_packed(position_ids)

    _replace(masks, "find_packed_sequence_indices", find_packed_sequence_indices)
    # where a model builds one: within one request positions rise by one, so it adds nothing to what it overlays
    packed = masks.packed_sequence_mask_function
    _replace(masks, "packed_sequence_mask_function", with_spec(packed, lambda _: MaskSpec()))
    if remap := getattr(masks, "remap_positions_for_packed_sequence", None):  # from 5.24 on
        remapped = with_spec(remap, lambda mask_function, _: getattr(mask_function, "hf_cb_spec", None))
        _replace(masks, "remap_positions_for_packed_sequence", remapped)
