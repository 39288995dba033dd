"""Which backend computes which layers: the one asked for, or for each kind of layer the first that can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_cb.attention import backend as registry
from hf_cb.attention.backend import AttentionBackend
from hf_cb.attention.pages import PagesBackend
from hf_cb.attention.several import SeveralBackends
from hf_cb.attention.trial import failure
from hf_cb.errors import OptionError

if TYPE_CHECKING:
    import torch

    from hf_cb.steps import LayerFacts


def choose_backend(
    name: str | None, layers: Sequence[LayerFacts], kv_dtype: str | None = None, block_size: int | None = None
) -> tuple[AttentionBackend, str]:
    """The backend for these layers, and the reason in words.

    Without a name, layers that may share a storage (`LayerFacts.kv_shape`) get the first of the backends for their kind
    of device that can do all of them; where those differ, the result is a `SeveralBackends`.

    `kv_dtype`: what the cache is kept in, if not in the layers' own dtype. `block_size`: as given by the user.

    Raises:
        OptionError: the one asked for is unknown or cannot do a layer; the message says which and why.
    """
    known = registry.backends()
    if name is not None and name not in known:
        raise OptionError(f"attention={name!r} is unknown; the backends are {', '.join(known)}.")
    if kv_dtype is not None:
        return _quantising(name, layers, kv_dtype), f"the one that keeps keys and values in {kv_dtype}"
    if name is None:
        return _automatic(layers, block_size)
    backend = known[name]()
    problem = _problem(backend, layers, block_size)
    if problem is not None:
        raise OptionError(f"attention={name!r} cannot run this model: {problem}.")
    return backend, "asked for"


def survey(device: torch.device) -> dict[str, str | None]:
    """For each backend why it does not compute a usual layer (bfloat16, 32 heads of 128) on this device, or None."""
    return {name: _problem(kind(), [usual_layer(device)], None) for name, kind in registry.backends().items()}


def usual_layer(device: torch.device) -> LayerFacts:
    import torch

    from hf_cb.steps import LayerFacts

    return LayerFacts(32, 8, 128, 128, scale=128**-0.5, dtype=torch.bfloat16, device=device)


def _automatic(layers: Sequence[LayerFacts], block_size: int | None) -> tuple[AttentionBackend, str]:
    if not layers:
        return _first("cpu", [], block_size, {})
    of_shape: dict[tuple, list[LayerFacts]] = {}
    for layer in layers:
        of_shape.setdefault(layer.kv_shape, []).append(layer)
    made: dict[str, AttentionBackend] = {}
    chosen: dict[tuple, AttentionBackend] = {}
    counts: dict[str, int] = {}
    reasons: list[str] = []
    for shape, alike in of_shape.items():
        chosen[shape], why = _first(alike[0].device.type, alike, block_size, made)
        counts[chosen[shape].name] = counts.get(chosen[shape].name, 0) + len(alike)
        if why not in reasons:
            reasons.append(why)
    if len(counts) == 1:
        return next(iter(chosen.values())), "; ".join(reasons)
    shares = ", ".join(f"{name} for {count} layers" for name, count in counts.items())
    return SeveralBackends(chosen), f"{shares}; {'; '.join(reasons)}"


def _first(
    device_type: str, layers: Sequence[LayerFacts], block_size: int | None, made: dict[str, AttentionBackend]
) -> tuple[AttentionBackend, str]:
    """The first that can do all these layers, which are of one shape, and why none before it."""
    passed: list[str] = []
    for name, kind in registry.backends().items():
        if kind.device_types is not None and device_type not in kind.device_types:
            continue
        if name not in made:
            made[name] = kind()
        problem = _problem(made[name], layers, block_size)
        if problem is None:
            return made[name], "; ".join(passed) or f"the first choice on {device_type}"
        passed.append(f"{name}: {problem}")
    raise OptionError(f"No attention backend can run this model: {'; '.join(passed)}.")


def _quantising(name: str | None, layers: Sequence[LayerFacts], kv_dtype: str) -> AttentionBackend:
    from hf_cb.attention.cpu import CpuBackend
    from hf_cb.attention.triton import TritonBackend

    backend: AttentionBackend = CpuBackend(kv_dtype) if kv_dtype == "int8" else TritonBackend(kv_dtype)
    if name not in (None, backend.name):
        raise OptionError(
            f"kv_dtype={kv_dtype!r} needs attention={backend.name!r}, not {name!r}: leave one of the two unset."
        )
    problem = _problem(backend, layers, None)
    if problem is not None:
        raise OptionError(
            f"kv_dtype={kv_dtype!r} needs the {backend.name} backend, which cannot run this model: {problem}. "
            f"Leave kv_dtype unset."
        )
    return backend


def _problem(backend: AttentionBackend, layers: Sequence[LayerFacts], block_size: int | None) -> str | None:
    missing = backend.missing()
    if missing is not None:
        return missing
    if block_size is not None and block_size % backend.block_multiple:
        return (
            f"its blocks have a multiple of {backend.block_multiple} tokens, not {block_size}: leave block_size unset, "
            f"or give {backend.usual_block_size}"
        )
    if (
        problem := next((why for layer in layers if (why := backend.unsupported(layer)) is not None), None)
    ) is not None:
        return problem
    if block_size in (None, backend.usual_block_size) or not isinstance(backend, PagesBackend):
        return None
    trials = (failure(backend, layer, backend.kept_in(layer), block_size) for layer in layers)
    return next((f"{why} (with blocks of {block_size} tokens)" for why in trials if why is not None), None)
