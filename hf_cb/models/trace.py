"""What a model's attention calls look like, and which of its modules keep a state: seen in forwards of two tokens."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from hf_cb.attention.interception import AttentionCall, Drive, stepping
from hf_cb.core import LayerFacts
from hf_cb.errors import UnsupportedModelError
from hf_cb.kernels.reference.paged_attention import chunk_attention
from hf_cb.models import lanes
from hf_cb.models.device import device_of, turn
from hf_cb.models.driving import cache_argument, name_arguments
from hf_cb.models.recurrent import Piece, drive_pieces, find_recurrent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 5  # that a trace runs through a model

CallKey = tuple[int, int]  # (id of the module, how many times it has attended in this forward)


@dataclass
class Recurrent:
    """Modules that keep a state for each request, an empty cache for it, and its size in bytes.

    `restarting` are classes that take a whole prompt or a single token: given more tokens, they forget their state.
    """

    modules: list[nn.Module]
    make_cache: Callable[[], Cache]
    state_bytes: int
    restarting: set[type]


@dataclass
class Trace:
    """The attention calls of a model, in order, as one small forward showed them."""

    keys: list[CallKey] = field(default_factory=list)
    layers: list[LayerFacts] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)
    recurrent: Recurrent | None = None


@dataclass
class _Tracing:
    """A step that takes notes, and attends within its own few tokens."""

    trace: Trace = field(default_factory=Trace)
    counts: Counter[int] = field(default_factory=Counter)
    drives: Mapping[int, Drive] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, sinks: Tensor | None
    ) -> Tensor:
        self.trace.keys.append((id(module), self.counts[id(module)]))
        self.counts[id(module)] += 1
        self.trace.calls.append(call)
        self.trace.layers.append(
            LayerFacts(
                num_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                head_dim=k.shape[2],
                v_head_dim=v.shape[2],
                scale=call.scale,
                dtype=k.dtype,
                device=k.device,
                window=call.window,
                chunk=call.chunk,
                softcap=call.softcap,
                has_sinks=call.has_sinks,
            )
        )
        options = (call.window, call.chunk, call.softcap, sinks)
        return chunk_attention(q, k.transpose(0, 1), v.transpose(0, 1), 0, 0, call.scale, *options)


@torch.no_grad()
def trace_layers(model: PreTrainedModel) -> Trace:
    """Runs a few tokens through the model and notes what its attention calls look like.

    Raises:
        UnsupportedModelError: nothing that we know reached us, or a call that we cannot compute.
    """
    step = _Tracing()
    with stepping(step):
        _run(model, use_cache=False)
    trace = step.trace
    trace.recurrent = _trace_states(model, find_recurrent(model, {module for module, _ in trace.keys}))
    if not trace.layers and trace.recurrent is None:
        raise UnsupportedModelError(f"{type(model).__name__} reaches no attention function that hf_cb can page.")
    return trace


def _trace_states(model: PreTrainedModel, modules: list[nn.Module]) -> Recurrent | None:
    """Runs a few tokens with the cache that the model makes for itself: which modules use it, and what they keep."""
    made: list[Cache] = []
    restarting: dict[type, bool] = {}
    using: set[int] = set()

    def drive(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cls = module.__class__
        call, name = name_arguments(cls, args, kwargs), cache_argument(cls)
        if call.get(name) is None:
            return forward(*args, **kwargs)
        using.add(id(module))
        make_cache = _cache_maker(model, call[name])
        if not made:
            made.append(make_cache())
        whole = forward(**call | {name: made[0]})
        if cls not in restarting:
            pieces = [Piece(make_cache(), None, begin, end) for begin, end in ((0, 2), (2, TOKENS))]
            pieces[1].cache = pieces[0].cache
            restarting[cls] = not _same(whole, drive_pieces(cls, pieces, forward, (), call))
        return whole

    if not modules:
        return None
    step = _Tracing(drives={id(m): functools.partial(drive, m) for m in modules})
    with stepping(step, {type(m) for m in modules}):
        _run(model, use_cache=True)
    if not made:
        return None
    name = type(model).__name__
    if any(isinstance(layer, CacheLayerMixin) and layer.keys is not None for layer in made[0].layers):
        raise UnsupportedModelError(f"{name} keeps keys that reach no attention function that hf_cb can page.")
    return Recurrent(
        [module for module in modules if id(module) in using],
        _cache_maker(model, made[0]),
        state_bytes=sum(t.nbytes for t in lanes.tensors(made[0])),
        restarting={cls for cls, restarts in restarting.items() if restarts},
    )


def _cache_maker(model: PreTrainedModel, like: Any) -> Callable[[], Cache]:
    """Makes empty caches of the kind that the model has made for itself."""
    kind: Any = type(like)
    if not issubclass(kind, Cache):
        raise UnsupportedModelError(f"{type(model).__name__} keeps a state in {kind.__name__}, which is no cache.")
    if kind is DynamicCache:
        return functools.partial(DynamicCache, config=model.config.get_text_config(decoder=True))
    make: Callable[[], Cache] = kind
    return make


def _same(want: Any, got: Any) -> bool:
    """Equal but for rounding."""
    a, b = (x if isinstance(x, Tensor) else x[0] for x in (want, got))
    limit = 1e-3 if a.dtype in (torch.float32, torch.float64) else 3e-2
    return bool((a - b).abs().max() <= limit * a.abs().max())


def _run(model: PreTrainedModel, use_cache: bool) -> None:
    ids = torch.arange(TOKENS, device=device_of(model))[None]
    with turn(model):
        model(input_ids=ids, position_ids=ids, use_cache=use_cache)
