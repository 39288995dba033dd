"""A decoder read from a model: its recipe, told from one small mixed forward, and verified against it by layers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cb.attention.cpu import CpuBackend
from hf_cb.core import GroupBatch, StepBatch
from hf_cb.models.paged import PagedModel
from hf_cb.modules.decoder import Decoder, PackedDecoder, Place
from hf_cb.modules.recipe import LayerRecipe, ModelRecipe, RotaryRecipe
from hf_cb.modules.recognise import NotRecognised, is_plain_linear, layer_candidates, norm_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (11, 6)
# how far a layer's change of its input may be from the original's, and logits from logits, relative to the largest
TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass
class Seen:
    """One layer in the forward that was watched: hidden states in and out `[T, H]`, its rotary pair, and the order in
    which its children were called."""

    module: nn.Module
    attention: nn.Module
    before: Tensor | None = None
    after: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    calls: list[nn.Module] = field(default_factory=list)


@dataclass
class Watched:
    """What a forward showed: its layers, the modules that made rotary pairs, what came in last, and the logits."""

    layers: list[Seen]
    batch: StepBatch
    made: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)
    norms: list[tuple[nn.Module, Tensor]] = field(default_factory=list)  # in order, with what they gave
    logits: Tensor | None = None


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
    watched = _watch(exact)
    recipes: list[LayerRecipe] = []
    for i in range(len(watched.layers)):
        recipes.append(_read_layer(exact, watched, i, recipes))
    recipe, batch, logits = _read_model(exact, watched, recipes), watched.batch, watched.logits
    assert logits is not None
    return Reading(recipe, batch, logits if exact is paged else paged.forward(batch).float())


# ------------------------------------------------------------------------------------------------------------- watching


def _watch(paged: PagedModel) -> Watched:
    model = paged.model
    watched = Watched(_layers_of(paged), small_batch(paged))
    inside = {id(m) for seen in watched.layers for m in seen.module.modules()}
    with _hooks() as hook:
        for seen in watched.layers:
            _watch_layer(seen, hook)
        for module in model.modules():
            if id(module) not in inside and next(module.children(), None) is None:
                hook(module, lambda m, args, kwargs, out: _note(watched, m, args, kwargs, out))
        watched.logits = paged.forward(watched.batch).float()
    if any(seen.before is None or seen.after is None for seen in watched.layers):
        raise NotRecognised("a layer gives its hidden states in an unknown way")
    return watched


def _layers_of(paged: PagedModel) -> list[Seen]:
    attending = {module for module, _ in paged.trace.keys}
    if len(attending) != len(paged.trace.keys):
        raise NotRecognised("a module attends more than once")
    found = []
    for parent in paged.model.modules():
        for child in parent.children() if isinstance(parent, nn.ModuleList) else ():
            inside = [m for m in child.modules() if id(m) in attending]
            if len(inside) == 1 and inside[0] is not child:
                found.append(Seen(child, inside[0]))
    order = {key: i for i, (key, _) in enumerate(paged.trace.keys)}
    found.sort(key=lambda seen: order[id(seen.attention)])
    if len(found) != len(attending):
        raise NotRecognised("its attention modules do not lie in a list of layers, one in each")
    return found


def _watch_layer(seen: Seen, hook: Callable[..., None]) -> None:
    def whole(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        given_back = out[0] if isinstance(out, tuple) else out
        if isinstance(given, Tensor) and isinstance(given_back, Tensor) and given.dim() == given_back.dim() == 3:
            seen.before, seen.after = given[0].clone(), given_back[0].clone()
        pair = kwargs.get("position_embeddings")
        if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(t, Tensor) for t in pair):
            seen.rotary = pair
        elif pair is not None:
            seen.before = None

    hook(seen.module, whole)
    for child in seen.module.children():
        hook(child, lambda m, args, kwargs, out: seen.calls.append(m))


def _note(watched: Watched, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    if isinstance(out, tuple) and len(out) == 2 and all(isinstance(t, Tensor) for t in out):
        watched.made.append((module, args, kwargs, out))
    weight = module._parameters.get("weight")
    if isinstance(out, Tensor) and weight is not None and weight.dim() == 1:
        watched.norms.append((module, out))


@contextmanager
def _hooks() -> Iterator[Callable[..., None]]:
    handles: list[Any] = []

    def hook(module: nn.Module, function: Callable[..., None]) -> None:
        handles.append(module.register_forward_hook(function, with_kwargs=True))

    try:
        yield hook
    finally:
        for handle in handles:
            handle.remove()


def small_batch(paged: PagedModel) -> StepBatch:
    """Two short prompts in one step, in blocks of their own (the cache is empty when this runs)."""
    block_size = paged.block_size
    total = sum(LENGTHS)
    vocab = paged.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (total,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    ends = torch.tensor(LENGTHS).cumsum(0)
    per = [-(-n // block_size) for n in LENGTHS]
    groups, block = [], 1
    for _ in paged.groups:
        table = torch.zeros(len(LENGTHS), max(per), dtype=torch.int32)
        for row, count in zip(table, per, strict=True):
            row[:count] = torch.arange(block, block + count)
            block += count
        rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        blocks = table[rows, positions // block_size].long()
        groups.append(GroupBatch(blocks * block_size + positions % block_size, table, [], []))
    if block - 1 > paged.num_blocks:
        raise NotRecognised("the KV cache is too small to try its layers in")
    return StepBatch(
        requests=[],
        input_ids=ids,
        position_ids=positions,
        logits_rows=torch.cat([ends - 1, ends - 2]),
        cu_seqlens_q=torch.cat([torch.zeros(1), ends]).int(),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        query_lens_list=list(LENGTHS),
        seq_lens_list=list(LENGTHS),
        groups=groups,
        block_size=block_size,
    )


# -------------------------------------------------------------------------------------------------------------- reading


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
