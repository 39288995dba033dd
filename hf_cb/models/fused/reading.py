"""A decoder read from a model: its recipe, told from one small mixed forward, and verified against it by layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cb.attention.cpu import CpuBackend
from hf_cb.models.fused.watching import Seen, Watched, watch
from hf_cb.models.paged import PagedModel
from hf_cb.modules.decoder import Decoder, PackedDecoder, Place
from hf_cb.modules.recipe import LayerRecipe, ModelRecipe, RotaryRecipe
from hf_cb.modules.recognise import NotRecognised, is_plain_linear, layer_candidates, norm_recipe
from hf_cb.steps import StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# how far a layer's change of its input may be from the original's; a quarter of it is taken without a second look
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}

# a layer of that index by a recipe: hidden states `[T, H]` in and out; raises NotRecognised where it lacks something
Compute = Callable[[PagedModel, StepBatch, int, LayerRecipe, Tensor], Tensor]


@dataclass
class Reading:
    """A model's recipe, and the step that it was told from, with its logits `[S, V]` and how far its positions go."""

    recipe: ModelRecipe
    batch: StepBatch
    logits: Tensor
    positions: int


@torch.no_grad()
def read_decoder(paged: PagedModel, compute: Compute) -> Reading:
    """The recipe of a model whose every layer is understood, and comes out right when `compute` follows it.

    Raises:
        NotRecognised: with the first thing that is not.
    """
    if paged.rope is not None or paged.states is not None:
        raise NotRecognised("it has modules that must see each request by itself")
    watched = watch(paged)
    recipes: list[LayerRecipe] = []
    for i in range(len(watched.layers)):
        recipes.append(_read_layer(paged, watched, i, recipes, compute))
    assert watched.logits is not None
    positions = int(watched.batch.position_ids.max()) + 1
    return Reading(_read_model(paged, watched, recipes), watched.batch, watched.logits, positions)


def _read_layer(
    paged: PagedModel, watched: Watched, index: int, earlier: Sequence[LayerRecipe], compute: Compute
) -> LayerRecipe:
    seen, facts = watched.layers[index], paged.trace.layers[index]
    candidates = list(
        layer_candidates(seen.module, seen.attention, seen.calls, facts, _rotary(watched, seen, facts.head_dim))
    )
    if earlier:  # layers are mostly alike
        candidates.sort(key=lambda c: _reading(c) != _reading(earlier[-1]))
    before, after = seen.before, seen.after
    assert before is not None and after is not None
    if not before.dtype == after.dtype == candidates[0].o.weight.dtype:
        raise NotRecognised(f"its hidden states are {before.dtype}, and its weights {candidates[0].o.weight.dtype}")
    limit, errors = TOLERANCE[facts.dtype], [float("inf")]
    lacking: NotRecognised | None = None
    for candidate in candidates:
        try:
            errors.append(_error(compute(paged, watched.batch, index, candidate, before), before, after))
        except NotRecognised as reason:
            lacking = lacking or reason
            errors.append(float("inf"))
        if errors[-1] <= limit / 4:
            return candidate
    least = min(errors)
    if lacking is not None and least == float("inf"):
        raise lacking
    if least > limit:
        also = f", and of one {lacking}" if lacking else ""
        raise NotRecognised(
            f"no reading of {type(seen.module).__name__} gives what it gives (off by {least:.1g}){also}"
        )
    return candidates[errors.index(least) - 1]


def place_of(paged: PagedModel, layer: int) -> Place:
    """Where a layer of a model on the cpu backend keeps its keys and values."""
    storage, group = paged.place(layer)
    return Place(storage.describe(paged.trace.layers[layer]), group)


def native_layer(paged: PagedModel, batch: StepBatch, index: int, recipe: LayerRecipe, before: Tensor) -> Tensor:
    """By the native kernels of the cpu backend."""
    backend = paged.backend
    assert isinstance(backend, CpuBackend) and backend.table is not None
    packed = PackedDecoder([recipe], backend.table, torch.get_num_threads())
    decoder = Decoder(packed, [place_of(paged, index)], int(batch.position_ids.max()) + 1)
    return decoder.run(batch, before.contiguous())


def _error(got: Tensor, before: Tensor, after: Tensor) -> float:
    """How far a layer's change of `before` is from that of the original: root mean squares, row by row, and the worst
    row. What rounding of the sum itself explains is taken off."""
    got, want = got.double(), after.double()
    change = (want - before.double()).square().mean(-1).sqrt()
    rounding = torch.finfo(before.dtype).eps * want.square().mean(-1).sqrt()
    off = ((got - want).square().mean(-1).sqrt() - rounding).clamp(min=0)
    return float((off / change.clamp(min=1e-12)).max())


def _reading(recipe: LayerRecipe) -> tuple[Any, ...]:
    norms = (recipe.input_norm, recipe.post_attention_norm, recipe.pre_mlp_norm, recipe.post_mlp_norm)
    turning = recipe.rotary
    return (*(n is None for n in norms), recipe.parallel, turning is None, turning is not None and turning.interleaved)


def _rotary(watched: Watched, seen: Seen, head_dim: int) -> RotaryRecipe | None:
    """How the pair that the layer was given is made for any positions."""
    if seen.rotary is None:
        return None
    pair = seen.rotary
    made = next((i for i, (_, _, _, out) in enumerate(watched.made) if all(map(operator.is_, out, pair))), None)
    if made is None:
        raise NotRecognised("its rotary embeddings come from an unknown place")
    module, args, kwargs, _ = watched.made[made]
    num_tokens = len(watched.batch.input_ids)

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        def change(value: Any) -> Any:
            if isinstance(value, Tensor) and not value.is_floating_point() and value.shape == (1, num_tokens):
                return positions[None].to(value.device)
            return value

        with torch.inference_mode(False), torch.no_grad():
            cos, sin = module(*map(change, args), **{name: change(value) for name, value in kwargs.items()})
        return cos[0], sin[0]

    at = watched.batch.position_ids
    recipe = RotaryRecipe(angles, key=made, module=module)
    cos, sin = recipe.table(int(at.max()) + 1)
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[1] % 2 or cos.shape[1] > head_dim:
        raise NotRecognised(f"{type(module).__name__} gives angles of an unknown shape")
    if not torch.equal(cos[at], seen.rotary[0][0]) or not torch.equal(sin[at], seen.rotary[1][0]):
        raise NotRecognised(f"{type(module).__name__} gives no table of angles")
    return recipe


def _read_model(paged: PagedModel, watched: Watched, layers: list[LayerRecipe]) -> ModelRecipe:
    model: PreTrainedModel = paged.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not is_plain_linear(head):
        raise NotRecognised("its embedding or its head is of an unknown kind")
    same = (embedding.weight.dtype, embedding.weight.shape) == (head.weight.dtype, head.weight.shape)
    if not same or not embedding.weight.is_contiguous():
        raise NotRecognised("its embedding is not of the shape and dtype of its head")
    if not watched.norms or watched.logits is None:
        raise NotRecognised("it has no final norm")
    first, batch = watched.layers[0].before, watched.batch
    assert first is not None
    rows = embedding.weight[batch.input_ids].float()
    multiplier = _multiplier(rows, first.float(), first.dtype)
    final, normed = watched.norms[-1]
    raw = normed[0] if normed.dim() == 3 else normed
    raw = raw[batch.logits_rows] if len(raw) == len(batch.input_ids) else raw
    raw = F.linear(raw, head.weight, head.bias).float()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    scaled = 1.0 if softcap else _multiplier(raw, watched.logits, first.dtype)
    return ModelRecipe(embedding, tuple(layers), norm_recipe(final), head, multiplier, scaled, softcap)


def _multiplier(rows: Tensor, given: Tensor, dtype: torch.dtype) -> float:
    """The number that makes `given` of `rows`."""
    if rows.shape != given.shape:
        raise NotRecognised("something unknown lies between embedding and layers, or between norm and head")
    large = rows.abs() > rows.abs().mean()
    found = float((given[large] / rows[large]).median())
    found = 1.0 if abs(found - 1) < 4 * torch.finfo(dtype).eps else found
    if (given - rows * found).abs().max() > max(4 * torch.finfo(dtype).eps, 1e-4) * given.abs().max():
        raise NotRecognised("something unknown lies between embedding and layers, or between norm and head")
    return found
