"""The engine on a list of requests, without a model and on a clock of its own: who would run when, and why not sooner.

Scheduler, policies, block tables, prefix cache and commits are the real ones. Only the forward is left out: every token
is 0, and a step takes as long as `step_time` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams, Status, Update
from hf_cb.engine.engine import Engine
from hf_cb.engine.flight import InFlight
from hf_cb.engine.limits import fit
from hf_cb.errors import OptionError, PromptError
from hf_cb.models.groups import LayerGroup
from hf_cb.policies import make_policy
from hf_cb.sizes import ResolvedConfig, Surroundings, resolve
from hf_cb.steps import Drawn, StepBatch, StepRecord

StepTime = Callable[[int, int], float]  # seconds, from the rows that generate and the prompt tokens


@dataclass(frozen=True)
class SimulatedRequest:
    """One request; lengths in tokens, times in seconds (in steps, if each takes one second).

    Args:
        prompt: its length.
        output: tokens that it generates; still to come, if it is `running` at the start, with its prompt computed.
        deadline: seconds after its arrival.
        prefix: a name for the first `prefix_tokens` of the prompt, which are the same wherever that name is.
    """

    name: str
    prompt: int
    output: int
    arrival: float = 0.0
    running: bool = False
    priority: int = 0
    user: str | None = None
    deadline: float | None = None
    prefix: str | None = None
    prefix_tokens: int = 0


@dataclass(frozen=True)
class SimulatedStep:
    """One step: who was in it with how many tokens, and what became of it. Without parts, nobody was let in."""

    at: float
    until: float
    parts: list[tuple[str, int]] = field(default_factory=list)
    record: StepRecord | None = None
    first_tokens: list[str] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    gave_way: list[str] = field(default_factory=list)


WORKED_EXAMPLE = [
    SimulatedRequest("A", prompt=1, output=2, running=True),
    SimulatedRequest("B", prompt=1, output=4, running=True),
    SimulatedRequest("C", prompt=7, output=1),
]
WORKED_BUDGETS = {"max_batch_tokens": 5, "max_num_seqs": 2}


class Simulation:
    """Requests on an engine without a model; `requests` are the engine's own, in the order given.

    Args:
        options: as for a model; the KV cache holds everything unless `num_blocks` says otherwise.

    Raises:
        OptionError: those that are to be running at the start do not fit. PromptError: a request can never fit.
    """

    def __init__(
        self, given: Sequence[SimulatedRequest], options: EngineConfig, step_time: StepTime = lambda rows, tokens: 1.0
    ) -> None:
        if len({g.name for g in given}) < len(given):
            raise OptionError("Two requests have the same name: give each its own.")
        self.clock = SimulatedClock()
        self.runner = NoModel(self.clock, step_time)
        self.engine = Engine(self.runner, _resolved(given, options), make_policy(options.policy), clock=self.clock)
        began = [g for g in given if g.running]
        self.clock.now -= step_time(0, sum(g.prompt for g in began)) if began else 0.0
        prefixes = {name: i + 1 for i, name in enumerate(dict.fromkeys(g.prefix for g in given))}
        self.requests = [
            _request(g, place + 1, prefixes[g.prefix], self.clock.now if g.running else g.arrival)
            for place, g in enumerate(given)
        ]
        for request in self.requests:
            try:
                fit(request, self.engine.config, self.engine.kv)
            except PromptError as error:
                raise PromptError(f"Request {request.request_id}: {error}") from error
        self._coming = sorted((r for r, g in zip(self.requests, given, strict=True) if not g.running), key=_created)
        self._begin([r for r, g in zip(self.requests, given, strict=True) if g.running])

    def __iter__(self) -> Iterator[SimulatedStep]:
        """The steps, one after the other, until all requests have ended."""
        engine, clock = self.engine, self.clock
        while self._coming or engine.has_work:
            while self._coming and self._coming[0].created <= clock.now:
                engine.admit(self._coming.pop(0))
            engine.scheduler.close(not self._coming)
            at, updates = clock.now, engine.expire()
            flight = engine.launch() if engine.has_work else None
            if flight is None:
                if engine.has_work or self._coming:
                    wake = at + min([engine.idle_s(), *(r.created - at for r in self._coming[:1])])
                    clock.now = max(wake, math.nextafter(at, math.inf))  # a deadline is over just behind its time
                if engine.has_work or updates:
                    yield SimulatedStep(at, clock.now, ended=_ended(updates))
            else:
                yield self._commit(flight, at, updates)

    def _begin(self, running: list[Request]) -> None:
        """One step, before the first, in which all of these get their first token, whatever the budgets."""
        if not running:
            return
        engine, usual = self.engine, self.engine.config
        tokens = sum(len(r.prompt_ids) for r in running)
        for request in running:
            engine.admit(request)
        engine.scheduler.config = replace(usual, max_batch_tokens=tokens, prefill_chunk=tokens)
        engine.scheduler.close()
        flight = engine.launch()
        if flight is None or len(flight.plan.parts) < len(running):
            raise OptionError(
                f"{len(running)} requests are to be running at the start, and there is room for fewer: raise "
                f"max_num_seqs ({usual.max_num_seqs}) or num_blocks ({usual.num_blocks})."
            )
        engine.commit(flight)
        engine.scheduler.config = usual
        engine.records.clear()
        engine.num_steps = 0

    def _commit(self, flight: InFlight, at: float, updates: list[Update]) -> SimulatedStep:
        plan = flight.plan
        before = {part.request for part in plan.parts if part.request.first_token is None}
        updates = updates + self.engine.commit(flight)
        return SimulatedStep(
            at,
            self.clock.now,
            [(part.request.request_id, part.num_tokens) for part in plan.parts],
            self.engine.records[-1],
            [r.request_id for r in self.requests if r in before and r.first_token is not None],
            _ended(updates),
            [r.request_id for r in plan.preempted],
        )


class SimulatedClock:
    """Tells the time that it is given."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class NoModel:
    """A runner whose every token is 0, and whose steps take the time that `step_time` says."""

    groups = [LayerGroup(layers=(0,), storages=(0,))]
    device = torch.device("cpu")
    shares_prefixes = True
    overlaps = False
    scores_prompts = False

    def __init__(self, clock: SimulatedClock, step_time: StepTime) -> None:
        self.clock = clock
        self.step_time = step_time

    def forward(self, batch: StepBatch) -> Drawn:
        counts = zip(batch.requests, batch.query_lens_list, strict=True)
        rows = sum(count == 1 and request.num_output > 0 for request, count in counts)
        self.clock.now += self.step_time(rows, sum(batch.query_lens_list) - rows)
        return Drawn(torch.zeros(len(batch.logits_rows), dtype=torch.long))

    def lend(self) -> None: ...

    def new_requests(self) -> None: ...

    def warm_up(self) -> None: ...

    def weights_key(self) -> object:
        return None

    def key_regime(self, request: Request) -> Hashable:
        return None

    def forget(self, request: Request) -> None: ...


def _resolved(given: Sequence[SimulatedRequest], options: EngineConfig) -> ResolvedConfig:
    if options.kv_budget is not None:
        raise OptionError("kv_budget needs a model, whose blocks take memory: give num_blocks instead.")
    tokens = [g.prompt + g.output + 1 for g in given]
    around = Surroundings(
        max(tokens, default=1), 2**62, "cpu", lambda size: 1, need_tokens=sum(tokens), need_seqs=len(given)
    )
    return resolve(replace(options, max_memory_fraction=1.0), around)  # nobody's memory is used


def _request(given: SimulatedRequest, number: int, prefix: int, created: float) -> Request:
    """Token ids that no other request has, but for the prefix; negative, as no model's are."""
    shared = min(given.prefix_tokens, given.prompt) if given.prefix is not None else 0
    ids = [-prefix * 2**32 - i for i in range(shared)] + [number * 2**32 + i for i in range(shared, given.prompt)]
    return Request(
        given.name,
        ids,
        SamplingParams(given.output + given.running),
        priority=given.priority,
        user=given.user,
        deadline=None if given.deadline is None else created + given.deadline,
        arrival=number,
        created=created,
    )


def _created(request: Request) -> float:
    return request.created


def _ended(updates: Sequence[Update]) -> list[Request]:
    return [u.request for u in updates if u.request.status is Status.FINISHED]
