"""From modules to recipes: candidates for what a decoder layer does, read off the modules it is made of.

Names tell which linear layer is which, as they are the same all over transformers; numbers tell what a norm or an
activation computes. Where the modules leave several readings open (is the norm between attention and MLP the end of one
or the beginning of the other?), all of them are given, and whoever asks tries them on numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cb.modules.recipe import LayerRecipe, NormRecipe, Piece, RotaryRecipe
from hf_cb.modules.weights import PackedParameter
from hf_cb.steps import LayerFacts

QKV_NAMES = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("qkv_proj",), ("Wqkv",))
O_NAMES = ("o_proj", "out_proj", "dense")
GATED_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"))
PLAIN_NAMES = (("fc1", "fc2"), ("up_proj", "down_proj"), ("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"))
NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation")
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class NotRecognised(Exception):
    """Why a model's layers are left as they are."""


@torch.no_grad()
def norm_recipe(module: nn.Module) -> NormRecipe:
    """What a norm computes, by trying it on numbers.

    Raises:
        NotRecognised: neither RMSNorm nor LayerNorm with a weight.
    """
    weight, name = getattr(module, "weight", None), type(module).__name__
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or next(module.children(), None) is not None:
        raise NotRecognised(f"{name} is not a norm with a weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        raise NotRecognised(f"{name} has no epsilon")
    own = copy.deepcopy(module).to("cpu")
    exact = copy.deepcopy(own).float()  # in half precision, a mean of 0 would hide whether it is taken away
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator, dtype=torch.float32, device="cpu") + 3
    want = exact(x)
    bias = getattr(exact, "bias", None)
    for centred, plus_one in product((False, True), (False, True)):
        found = x - x.mean(-1, keepdim=True) if centred else x
        found = found * torch.rsqrt(found.square().mean(-1, keepdim=True) + eps)
        found = found * (exact.weight + plus_one)
        if bias is not None:
            found = found + bias
        if (want - found).abs().max() <= 1e-4 * want.abs().max():
            return NormRecipe(module, eps, centred, plus_one, not centred and _rounds_once(own, eps, plus_one))
    raise NotRecognised(f"{name} is neither RMSNorm nor LayerNorm")


def _rounds_once(module: nn.Module, eps: float, plus_one: bool) -> bool:
    """Whether RMSNorm in bfloat16 rounds after the weight alone, told by which way gives its results more often."""
    module.bfloat16()
    weight = module.weight.float() + plus_one
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    want = module(x)
    once, twice = (normed * weight).bfloat16(), (normed.bfloat16().float() * weight).bfloat16()
    return int((want != once).sum()) < int((want != twice).sum())


def activation_of(mlp: nn.Module) -> str:
    """The name of an MLP's activation function."""
    for attribute in ACTIVATION_NAMES:
        function = getattr(mlp, attribute, None)
        if callable(function):
            x = torch.linspace(-40, 40, 801, dtype=torch.float32, device="cpu")
            want = function(x)
            for name, known in ACTIVATIONS.items():
                if torch.allclose(want, known(x), atol=1e-5):
                    return name
    raise NotRecognised(f"the activation of {type(mlp).__name__} is unknown")


def layer_candidates(
    layer: nn.Module, attention: nn.Module, calls: Sequence[nn.Module], facts: LayerFacts, rotary: RotaryRecipe | None
) -> Iterator[LayerRecipe]:
    """Readings of a layer, the usual one first.

    Args:
        attention: the module of it that attends.
        calls: the layer's children in the order in which they were called.

    Raises:
        NotRecognised: naming the module that fits no reading.
    """
    if facts.has_sinks:
        raise NotRecognised("attention sinks")
    holder = next((c for c in layer.children() if any(m is attention for m in c.modules())), None)
    mlps = [c for c in layer.children() if _mlp(c) is not None]
    if holder is None or len(mlps) != 1:
        raise NotRecognised(f"{type(layer).__name__} is not made of one attention and one known MLP")
    mlp = mlps[0]
    names = _mlp(mlp)
    assert names is not None
    q_norm, k_norm, whole = _qk_norms(attention, facts)
    base = LayerRecipe(
        module=layer,
        facts=facts,
        qkv=_qkv(attention, facts),
        o=_linear(attention, O_NAMES, facts.num_heads * facts.v_head_dim),
        **_mlp_parts(mlp, names),
        q_norm=q_norm,
        k_norm=k_norm,
        norm_whole=whole,
        residual_multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
    )
    if any(parameter.device != facts.device for parameter in layer.parameters()):
        raise NotRecognised(f"{type(layer).__name__} has weights on another device than {facts.device}")
    for norms, turning in product(_norm_readings(layer, holder, mlp, calls), _rotary_readings(rotary)):
        yield base.but(**norms, rotary=turning)


def _rotary_readings(rotary: RotaryRecipe | None) -> list[RotaryRecipe | None]:
    if rotary is None:
        return [None]

    def spread(positions: Tensor) -> tuple[Tensor, Tensor]:  # Helium, GLM: the first half, each for two neighbours
        cos, sin = (t[:, : t.shape[1] // 2].repeat_interleave(2, 1) for t in rotary.angles(positions))
        return cos, sin

    neighbours = replace(rotary, interleaved=True)
    return [rotary, neighbours, replace(neighbours, angles=spread, key=(rotary.key, "spread")), None]


def _norm_readings(
    layer: nn.Module, attention: nn.Module, mlp: nn.Module, calls: Sequence[nn.Module]
) -> list[dict[str, Any]]:
    """What the norms of a layer may be to it, by where they were called."""
    order = [c for c in calls if c is attention or c is mlp or next(c.parameters(), None) is not None]
    if [c for c in order if c in (attention, mlp)] != [attention, mlp]:
        raise NotRecognised(f"{type(layer).__name__} does not call attention and then its MLP, each once")
    at, then = order.index(attention), order.index(mlp)
    parts = (order[:at], order[at + 1 : then], order[then + 1 :])
    before, between, after = ([norm_recipe(m) for m in part] for part in parts)
    if len(before) > 2 or len(between) > 2 or len(after) > 1:
        raise NotRecognised(f"{type(layer).__name__} has more norms than known readings")
    first = before[0] if before else None
    last = after[0] if after else None
    usual = dict(input_norm=first, post_mlp_norm=last)
    if len(before) == 2:
        return [usual | dict(pre_mlp_norm=before[1], parallel=True)]
    if len(between) == 2:
        return [usual | dict(post_attention_norm=between[0], pre_mlp_norm=between[1])]
    if len(between) == 1:
        return [
            usual | dict(pre_mlp_norm=between[0]),
            usual | dict(post_attention_norm=between[0]),
            usual | dict(pre_mlp_norm=between[0], parallel=True),
        ]
    return [usual | dict(parallel=True), usual]


def _qkv(attention: nn.Module, facts: LayerFacts) -> tuple[Piece, ...]:
    heads = ((facts.num_heads, facts.head_dim), (facts.num_kv_heads, facts.head_dim))
    sizes = tuple(count * dim for count, dim in (*heads, (facts.num_kv_heads, facts.v_head_dim)))
    for names in QKV_NAMES:
        found: list[Any] = [getattr(attention, name, None) for name in names]
        if all(is_plain_linear(m) for m in found):
            if len(found) == 1 and found[0].out_features == sum(sizes):
                return (Piece(found[0]),)
            if len(found) == 3 and tuple(m.out_features for m in found) == sizes:
                return tuple(Piece(m) for m in found)
    raise NotRecognised(f"the projections of {type(attention).__name__} are unknown")


def _qk_norms(attention: nn.Module, facts: LayerFacts) -> tuple[NormRecipe | None, NormRecipe | None, bool]:
    for names in NORM_NAMES:
        found = [getattr(attention, name, None) for name in names]
        if all(isinstance(m, nn.Module) for m in found):
            q, k = (norm_recipe(m) for m in found)
            sizes = tuple(n.module.weight.shape[0] for n in (q, k))
            if sizes == (facts.head_dim, facts.head_dim):
                return q, k, False
            if sizes == (facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim):
                return q, k, True
            raise NotRecognised(f"the query norm of {type(attention).__name__} has an unknown size")
    return None, None, False


def _mlp(module: nn.Module) -> tuple[str, ...] | None:
    known = GATED_NAMES + PLAIN_NAMES
    return next((names for names in known if all(is_plain_linear(getattr(module, n, None)) for n in names)), None)


def _mlp_parts(mlp: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    *ups, down = (getattr(mlp, name) for name in names)
    gated = names in GATED_NAMES
    size = down.in_features
    if gated and len(ups) == 1:
        pieces: tuple[Piece, ...] = (Piece(ups[0], 0, size), Piece(ups[0], size, size))
    else:
        pieces = tuple(Piece(m) for m in ups)
    if any(m.out_features != size * (len(pieces) // len(ups)) for m in ups):
        raise NotRecognised(f"the sizes of {type(mlp).__name__} fit no known MLP")
    return dict(gate_up=pieces, down=down, gated=gated, activation=activation_of(mlp))


def _linear(module: nn.Module, names: Sequence[str], inputs: int) -> nn.Linear:
    for name in names:
        found: Any = getattr(module, name, None)
        if is_plain_linear(found) and found.in_features == inputs:
            return found
    raise NotRecognised(f"the output projection of {type(module).__name__} is unknown")


def is_plain_linear(module: Any) -> bool:
    """A linear layer that is nothing more: no adapter, no quantised weight, no forward of its own."""
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and type(module.weight) in (nn.Parameter, PackedParameter)  # a quantised weight is of another class
        and (type(module.weight) is PackedParameter or not _is_lent(module.weight))
    )


def _is_lent(weight: nn.Parameter) -> bool:
    """Whether it is an inference tensor, or other processes see it (torch says so of all on a GPU)."""
    return weight.is_inference() or (weight.device.type == "cpu" and weight.is_shared())
