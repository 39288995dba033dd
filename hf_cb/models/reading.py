"""A decoder read from a model: its recipe, told from one small mixed forward, and verified against it by layers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cb.attention.cpu import CpuBackend
from hf_cb.core import StepBatch
from hf_cb.models.paged import PagedModel
from hf_cb.models.watching import LENGTHS, Seen, Watched, watch
from hf_cb.modules.decoder import Decoder, PackedDecoder, Place
from hf_cb.modules.recipe import LayerRecipe, ModelRecipe, RotaryRecipe
from hf_cb.modules.recognise import NotRecognised, is_plain_linear, layer_candidates, norm_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# how far a layer's change of its input may be from the original's, and logits from logits, relative to the largest
TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass
class Reading:
    """A model's recipe, and the step that it was told from, with its logits `[S, V]`."""

    recipe: ModelRecipe
    batch: StepBatch
    logits: Tensor


@torch.no_grad()
def read_decoder(paged: PagedModel) -> Reading:
    """The recipe of a model whose every layer is understood.

    Raises:
        NotRecognised: with the first thing that is not.
    """
    if not isinstance(paged.backend, CpuBackend):
        raise NotRecognised(f"attention runs on the {paged.backend.name} backend")
    if paged.rope is not None or paged.states is not None:
        raise NotRecognised("it has modules that must see each request by itself")
    exact = paged
    if paged.backend.kv_dtype is not None:  # in int8, what differs by rounding alone can differ by a whole step
        num_blocks = sum(LENGTHS) * len(paged.groups)
        exact = PagedModel(paged.model, paged.trace, paged.groups, CpuBackend(), num_blocks, paged.block_size)
    watched = watch(exact)
    recipes: list[LayerRecipe] = []
    for i in range(len(watched.layers)):
        recipes.append(_read_layer(exact, watched, i, recipes))
    recipe, batch, logits = _read_model(exact, watched, recipes), watched.batch, watched.logits
    assert logits is not None
    return Reading(recipe, batch, logits if exact is paged else paged.forward(batch).float())


def _read_layer(paged: PagedModel, watched: Watched, index: int, earlier: Sequence[LayerRecipe]) -> LayerRecipe:
    seen, facts = watched.layers[index], paged.trace.layers[index]
    candidates = list(layer_candidates(seen.module, seen.attention, seen.calls, facts, _rotary(watched, seen)))
    if earlier:  # layers are mostly alike
        candidates.sort(key=lambda c: _reading(c) != _reading(earlier[-1]))
    limit, best = TOLERANCE[facts.dtype], float("inf")
    assert seen.before is not None and seen.after is not None
    for candidate in candidates:
        off = layer_error(paged, watched.batch, index, candidate, seen.before, seen.after)
        if off <= limit:
            return candidate
        best = min(best, off)
    raise NotRecognised(f"no reading of {type(seen.module).__name__} gives what it gives (off by {best:.1g})")


def place_of(paged: PagedModel, layer: int) -> Place:
    """Where a layer of a model on the cpu backend keeps its keys and values."""
    storage, group = paged.place(layer)
    return Place(storage.describe(paged.trace.layers[layer]), group)


def layer_error(
    paged: PagedModel, batch: StepBatch, index: int, recipe: LayerRecipe, before: Tensor, after: Tensor
) -> float:
    """How far the native layer's change of `before` is from that of the original, relative to the largest change.

    What rounding of the sum itself explains is taken off.
    """
    backend = paged.backend
    assert isinstance(backend, CpuBackend) and backend.table is not None
    decoder = Decoder(PackedDecoder([recipe], backend.table, torch.get_num_threads()), [place_of(paged, index)])
    got, want = decoder.run(batch, before).double(), after.double()
    change = (want - before.double()).abs().max().clamp(min=1e-12)
    rounding = torch.finfo(before.dtype).eps * want.abs().max()
    return float(((got - want).abs().max() - rounding).clamp(min=0) / change)


def _reading(recipe: LayerRecipe) -> tuple[Any, ...]:
    norms = (recipe.input_norm, recipe.post_attention_norm, recipe.pre_mlp_norm, recipe.post_mlp_norm)
    turning = recipe.rotary
    return (*(n is None for n in norms), recipe.parallel, turning is None, turning is not None and turning.interleaved)


def _rotary(watched: Watched, seen: Seen) -> RotaryRecipe | None:
    """How the pair that the layer was given is made for any positions."""
    if seen.rotary is None:
        return None
    pair = seen.rotary
    made = next((i for i, (_, _, _, out) in enumerate(watched.made) if all(map(operator.is_, out, pair))), None)
    if made is None:
        raise NotRecognised("its rotary embeddings come from an unknown place")
    module, args, kwargs, _ = watched.made[made]
    num_tokens = len(watched.batch.input_ids)

    def table(positions: int) -> tuple[Tensor, Tensor]:
        def change(value: Any) -> Any:
            if isinstance(value, Tensor) and not value.is_floating_point() and value.shape == (1, num_tokens):
                return torch.arange(positions)[None]
            return value

        with torch.inference_mode(False), torch.no_grad():
            cos, sin = module(*map(change, args), **{name: change(value) for name, value in kwargs.items()})
        return cos[0], sin[0]

    cos, sin = table(max(LENGTHS))
    at = watched.batch.position_ids
    if cos.dim() != 2 or not torch.equal(cos[at], seen.rotary[0][0]) or not torch.equal(sin[at], seen.rotary[1][0]):
        raise NotRecognised(f"{type(module).__name__} gives no table of angles")
    return RotaryRecipe(table, key=made)


def _read_model(paged: PagedModel, watched: Watched, layers: list[LayerRecipe]) -> ModelRecipe:
    model: PreTrainedModel = paged.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not is_plain_linear(head):
        raise NotRecognised("its embedding or its head is of an unknown kind")
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
