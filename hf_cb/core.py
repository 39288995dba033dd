"""The vocabulary of hf_cb on one page: what a request is, and what comes back. A step's is in `steps`.

A request has `token_ids` (prompt and output) and `num_computed` of them have their keys and values in the cache. There
is no prefill phase and no decode phase: a step computes some of the difference (vLLM's formulation).
"""

from __future__ import annotations

import enum
import itertools
import time
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from transformers.generation.continuous_batching.requests import GenerationOutput as _TransformersOutput

from hf_cb.html import result_card
from hf_cb.penalties import Penalties, TokenCounts
from hf_cb.warpers import Warpers

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]

_arrivals = itertools.count()


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_FINISHED = Status.FINISHED  # Python 3.11 takes 50 ns to find a member, and each row of a step is asked four times


class LogitsProcess(Protocol):
    """Changes the scores of one request's next token: ids `[1, n]` int64, scores `[1, V]` float32 -> `[1, V]`."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor: ...


class StopCheck(Protocol):
    """Says after each token whether a request is to end: `token_ids` is prompt and output, newest last. A string ends
    it too, and is its `stop_reason`."""

    def __call__(self, token_ids: Sequence[int]) -> bool | str: ...


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of the sampler and of the stop checks, fully resolved: nothing here is None-for-default."""

    max_new_tokens: int
    length_is_given: bool = True  # False: nobody set a length, so the KV cache may cut it short
    eos_token_ids: frozenset[int] = frozenset()
    do_sample: bool = False
    seed: int = 0  # matters only if `do_sample`
    process: LogitsProcess | None = None  # None: the raw logits decide
    penalties: Penalties | None = None  # what `process` does, first these and then the warpers, where they can say it
    warpers: Warpers | None = None
    takes_drafts: bool = True  # False: `process` keeps a state, so it must be asked once for each token
    stop_checks: tuple[StopCheck, ...] = ()
    max_time: float | None = None  # seconds since submission
    logprobs: bool = False
    raw_logprobs: bool = False  # by the model's own logits; else by what the processors leave of them
    top_logprobs: int | None = None  # the best so many besides the sampled token
    prompt_logprobs: int | None = None  # the best so many besides the prompt's own token
    output_logits: bool = False
    output_scores: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the largest of its raw logits is a request's next token."""
        return not self.do_sample and self.process is None

    @property
    def tells_more(self) -> bool:
        """Whether a token is not enough, nor one with its log-probability among the tokens that the processors
        leave."""
        other = self.raw_logprobs and self.logprobs
        return other or self.top_logprobs is not None or self.output_logits or self.output_scores

    @cached_property
    def is_bare(self) -> bool:
        """Whether it is plain, and its token is all that is asked for."""
        return self.is_plain and not (self.logprobs or self.tells_more)


@dataclass
class RequestMetrics:
    """Where a request's time went, in seconds, NaN until known."""

    queue_s: float = float("nan")
    prefill_s: float = float("nan")
    ttft_s: float = float("nan")  # from submission to the first token
    itl_s: float = float("nan")  # the mean between tokens after it
    e2e_s: float = float("nan")
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    will_miss: bool = False  # its deadline, as last judged by a policy that looks at it


@dataclass
class GenerationOutput(_TransformersOutput):
    """One sequence's result: transformers' fields, and the text, the reason it ended and where the time went."""

    index: int = 0  # of its prompt in the inputs
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or the end-of-sequence id that ended it
    # by token id, best first, the chosen token always among them; of a prompt's first token nothing is known
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    scores: tuple[Tensor, ...] | None = field(default=None, repr=False)  # `[V]` float32 each, as in `generate`
    logits: tuple[Tensor, ...] | None = field(default=None, repr=False)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    exception: Exception | None = field(default=None, repr=False)  # `error` is its message

    def _repr_html_(self) -> str:
        return result_card(self)


@dataclass(frozen=True)
class Delta:
    """New tokens of one sequence. `index` is the place of its prompt in the inputs; the last delta says why."""

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    stop_reason: str | int | None = None


@dataclass(eq=False)
class Request:
    """One sequence on its way. Filled by the caller, then by the scheduler, the KV cache and the engine."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0  # smaller is more important
    user: str | None = None  # who it is for
    deadline: float | None = None  # on time.perf_counter(), as is the next
    start_by: float | None = None
    fork_of: Request | None = None  # shares that request's prompt blocks once they are computed
    arrival: int = field(default_factory=lambda: next(_arrivals))
    created: float = field(default_factory=time.perf_counter)
    # by the scheduler
    status: Status = Status.WAITING
    num_computed: int = 0  # of a step that is launched too
    in_flight: int = 0  # tokens of steps that are launched and not yet committed
    ahead: int = 0  # sampled by such a step, and not yet among `token_ids`
    # by the KV cache: block tables by layer group (int32, as a step has them: 32k tokens are one copy, and not 2,000
    # numbers), hashes of full blocks, what keys depend on (`Runner.key_regime`)
    tables: list[array[int]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    epoch: int = 0
    regime: Hashable = None
    token_counts: TokenCounts | None = None  # by the sampler
    # by the engine
    token_ids: list[int] = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)  # from the second token on
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cancelled: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    exception: Exception | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.metrics.prompt_tokens = len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.token_ids) + self.ahead - self.num_computed

    @property
    def is_decoding(self) -> bool:
        known = len(self.token_ids) + self.ahead
        return known - self.num_computed == 1 and known > len(self.prompt_ids)

    @property
    def max_tokens(self) -> int:
        """Most tokens it can ever have in the KV cache: its last one is never computed."""
        return len(self.prompt_ids) + max(1, self.params.max_new_tokens) - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to come: then every token of it has to be computed."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt_ids) - 1


@dataclass(slots=True)
class Update:
    """What a step changed for one request: its new tokens, and whether it has ended."""

    request: Request
    new_ids: list[int]

    @property
    def finished(self) -> bool:
        return self.request.status is _FINISHED
