"""What to expect of a model on a machine before its weights are loaded: what its KV cache takes, how many requests fit,
which budget binds first, and the least time of a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from hf_cb.bench.floor import ModelCost, least_time, model_cost, step_seconds
from hf_cb.bench.speeds import Speeds
from hf_cb.bench.workload import BenchRequest, Workload
from hf_cb.config import EngineConfig
from hf_cb.errors import OptionError, UnsupportedModelError
from hf_cb.manager.probe import judge_architecture
from hf_cb.models.outline import weight_bytes
from hf_cb.models.plan import ModelPlan, Need, Room, plan_dense, plan_paged
from hf_cb.models.support import check_supported
from hf_cb.steps import LayerFacts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Load:
    """Requests of one size, all at once: tokens of each prompt and of each answer."""

    prompt: int
    output: int
    requests: int

    @property
    def cached(self) -> int:
        """Tokens of a request whose keys are kept at its end: the last one is never computed."""
        return self.prompt + self.output - 1


@dataclass(frozen=True)
class GroupNeed:
    """Layers that see the same keys: bytes of one token in all of them, and how far back they look."""

    layers: int
    token_bytes: int
    facts: LayerFacts
    window: int | None
    chunk: int | None

    def kept(self, tokens: int) -> int:
        """How many of a request's tokens these layers can still need."""
        reach = self.window or self.chunk
        return tokens if reach is None else min(tokens, reach)


@dataclass(frozen=True)
class Steps:
    """The least seconds of steps, and of the whole load: no engine is below."""

    one: float  # one answer alone
    all: float  # as many as run together, half way through their answers
    prompts: float  # full of prompt tokens
    whole: float
    tok_s: float


@dataclass
class Forecast:
    """`capacities`: how many of the load's requests can run together under each budget, had it no other."""

    path: str
    reason: str
    plan: ModelPlan
    load: Load
    weight_bytes: int
    groups: list[GroupNeed]
    capacities: dict[str, int]
    cost: ModelCost
    state_bytes: int = 0
    waste: float = 0.0  # share of a request's blocks that holds nothing it needs, at its end
    fragment: int = 0  # tokens of its last blocks that are empty then
    notes: list[str] = field(default_factory=list)

    @property
    def kv_bytes(self) -> int:
        """Of all blocks, the null block too: what the engine allocates."""
        return (self.plan.config.num_blocks + 1) * self.plan.block_bytes

    @property
    def token_bytes(self) -> int:
        """Of a token in all layers."""
        return sum(group.token_bytes for group in self.groups)

    @property
    def request_blocks(self) -> int:
        return blocks_of(self.plan, self.load.cached)

    @property
    def together(self) -> int:
        return min(self.load.requests, *self.capacities.values())

    @property
    def binding(self) -> str | None:
        """The budget that binds first; None if all requests run together."""
        first = min(self.capacities, key=lambda name: self.capacities[name])
        return first if self.capacities[first] < self.load.requests else None


def forecast(model: PreTrainedModel, options: EngineConfig, load: Load, room: Room) -> Forecast:
    """By the code that the engine itself takes its sizes from; `model` has shapes alone (`models.outline`), and `room`
    is what will be free beside its weights.

    Raises:
        UnsupportedModelError, OptionError: as a manager would.
    """
    check_supported(model, with_weights=False)
    verdict = judge_architecture(model)
    path, reason = (verdict.path, verdict.reason) if verdict else ("paged", "")
    notes = [] if verdict else ["no tiny model of its class tells whether it can be paged: that it can is assumed here"]
    plan, missing = _plan(path, model, options, load, room)
    if missing:
        notes.append(missing)
    groups = _needs(plan)
    config, recurrent = plan.config, plan.trace.recurrent
    found = Forecast(
        path=path,
        reason=reason,
        plan=plan,
        load=load,
        weight_bytes=weight_bytes(model),
        groups=groups,
        capacities={
            # in the long run a step has n answers and, to replace those that end, n * prompt / output prompt tokens
            "tokens": max(1, config.max_batch_tokens * load.output // (load.prompt + load.output)),
            "blocks": config.num_blocks // blocks_of(plan, load.cached),
            "requests": config.max_num_seqs,
        },
        cost=_cost(model, groups),
        state_bytes=recurrent.state_bytes if recurrent else 0,
        notes=notes,
    )
    if groups:
        useful = sum(group.token_bytes * group.kept(load.cached) for group in groups)
        held = sum(g.max_blocks(load.cached, 1, config.block_size) for g in plan.groups)  # of what its prompt took
        found.waste = 1 - useful / (held * plan.block_bytes)
        found.fragment = -load.cached % config.block_size
    if getattr(model.config, "quantization_config", None) is not None:
        notes.append("its weights are quantised and counted here as if they were not")
    return found


def _plan(
    path: str, model: PreTrainedModel, options: EngineConfig, load: Load, room: Room
) -> tuple[ModelPlan, str | None]:
    """The plan; where the memory holds no cache at all, the one that the load would need, and a word about that."""
    plan_path = plan_paged if path == "paged" else plan_dense
    try:
        try:
            return plan_path(model, options, None, room), None
        except OptionError:
            if options.kv_budget or options.num_blocks:
                raise
            need = Need(load.requests * load.cached, load.requests)
            endless, whole = Room(room.device, 2**60), replace(options, max_memory_fraction=1.0)
            plan = plan_path(model, whole, need, endless)
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, UnsupportedModelError):
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be run on shapes alone ({error}): load it, and ask hf_cb.explain(model)."
        ) from error
    plan.config.reasons["num_blocks"] = "what these requests need"
    return plan, "beside the weights there is no room for a KV cache: the one above is what these requests would need"


def expect(found: Forecast, speeds: Speeds) -> Steps:
    """The least that steps take at these speeds."""
    load, config, cost = found.load, found.plan.config, found.cost
    middle = load.prompt + load.output // 2
    rows = max(1, found.together)
    size = config.max_batch_tokens
    requests = [BenchRequest([0] * load.prompt, load.output)] * load.requests
    floor = least_time(cost, Workload("plan", requests), speeds, rows, budget=size)
    return Steps(
        one=step_seconds(cost, 1, 1, cost.kv_read(middle), speeds),
        all=step_seconds(cost, rows, rows, rows * cost.kv_read(middle), speeds),
        prompts=step_seconds(cost, size, max(1, size // load.prompt), 0, speeds),
        whole=floor.seconds,
        tok_s=floor.tok_s,
    )


def blocks_of(plan: ModelPlan, tokens: int) -> int:
    """Most blocks that a request of so many tokens holds at once."""
    config = plan.config
    return sum(g.max_blocks(tokens, config.max_batch_tokens, config.block_size) for g in plan.groups)


def _needs(plan: ModelPlan) -> list[GroupNeed]:
    """One entry for all layers of one shape that look back equally far; the engine may have them in several groups."""
    backend, size = plan.backend, plan.config.block_size
    alike: dict[tuple, list[LayerFacts]] = {}
    for group in plan.groups:
        for layer in (plan.trace.layers[i] for i in group.layers):
            alike.setdefault((group.window, group.chunk, layer.kv_shape), []).append(layer)
    needs = []
    for (window, chunk, _), layers in alike.items():
        assert backend is not None
        needs.append(
            GroupNeed(len(layers), len(layers) * backend.block_bytes(layers[0], size) // size, layers[0], window, chunk)
        )
    return needs


def _cost(model: PreTrainedModel, groups: list[GroupNeed]) -> ModelCost:
    """With the cache as the engine lays it out, where that is known."""
    cost = model_cost(model)
    if not groups:
        return cost
    return replace(
        cost, kv_bytes=tuple(g.token_bytes for g in groups), windows=tuple(g.window or g.chunk for g in groups)
    )


def room_for(model: PreTrainedModel, device: torch.device, free: int) -> Room:
    """What is left of some free memory once the weights are there."""
    return Room(device, max(0, free - weight_bytes(model)))
