"""What a model's attention calls look like, and which of its modules keep a state: seen in forwards of a few tokens."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from hf_cb.attention.interception import AttentionCall, Drive, stepping
from hf_cb.errors import UnsupportedModelError
from hf_cb.kernels.reference.paged_attention import chunk_attention
from hf_cb.models import lanes
from hf_cb.models.device import device_of, turn
from hf_cb.models.driving import cache_argument, check_drivable, name_arguments
from hf_cb.models.recurrent import Piece, find_recurrent, run_piece
from hf_cb.models.rope import rotary_by_length
from hf_cb.steps import LayerFacts

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
    rotary: set[int] = field(default_factory=set)  # ids of the length-dependent rotary modules that were called


@dataclass
class _Tracing:
    """A step that takes notes, and attends within its own few tokens."""

    trace: Trace = field(default_factory=Trace)
    counts: Counter[int] = field(default_factory=Counter)
    drives: Mapping[int, Drive] = field(default_factory=dict)
    driven: set[int] = field(default_factory=set)

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
    rotary = rotary_by_length(model)
    step = _Tracing(drives={id(m): lambda forward, args, kwargs: forward(*args, **kwargs) for m in rotary})
    with stepping(step, rotary):
        _run(model, use_cache=False)
    trace = step.trace
    trace.rotary = step.driven
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
        make_cache = _cache_maker(model, call[name])
        if not made:
            made.append(make_cache())
        kept = len(list(lanes.tensors(made[0])))
        whole = forward(**call | {name: made[0]})
        if len(list(lanes.tensors(made[0]))) == kept:
            return whole  # it takes the cache, and keeps nothing there
        using.add(id(module))
        if cls not in restarting:  # shapes alone do not tell
            restarting[cls] = device_of(model).type != "meta" and _restarts(cls, forward, call, make_cache)
        return whole

    if not modules:
        return None
    for module in modules:
        check_drivable(module)
    step = _Tracing(drives={id(m): functools.partial(drive, m) for m in modules})
    with stepping(step, modules):
        _run(model, use_cache=True)
    if not using:
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


def _restarts(cls: type, forward: Callable[..., Any], call: dict[str, Any], make_cache: Callable[[], Cache]) -> bool:
    """Whether several tokens are computed without the state before them: it is changed, and makes no difference."""
    cache = make_cache()
    run_piece(cls, Piece(cache, None, 0, 2), forward, call, TOKENS)

    def go_on(changed: int | None) -> Tensor:
        own = copy.deepcopy(cache)
        if changed is not None:
            states(own)[changed].add_(1)
        out = run_piece(cls, Piece(own, None, 2, TOKENS), forward, call, TOKENS)
        return out if isinstance(out, Tensor) else out[0]

    def states(of: Cache) -> list[Tensor]:
        return [t for t in lanes.tensors(of) if t.is_floating_point() and t.dim()]

    usual = go_on(None)
    return any(torch.equal(usual, go_on(i)) for i in range(len(states(cache))))


def _run(model: PreTrainedModel, use_cache: bool) -> None:
    ids = torch.arange(TOKENS, device=device_of(model))[None]
    with turn(model):
        model(input_ids=ids, position_ids=ids, use_cache=use_cache)
