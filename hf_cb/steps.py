"""The vocabulary of a step: who runs in it, as a plan, as flat tensors, and as the record that it leaves."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_cb.core import Request

NULL_BLOCK = 0  # the block that no request owns: table entries without content point at it, and it stays zero


@dataclass(frozen=True)
class LayerFacts:
    """What one attention call needs, as seen in the call itself, never from a model's config.

    A query at position p sees keys j <= p, and of those only j > p - `window`, or the ones in its own `chunk`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def kv_shape(self) -> tuple[Any, ...]:
        """Layers with the same shape can use the same storage."""
        return (self.num_kv_heads, self.head_dim, self.v_head_dim, self.dtype, self.device)


@dataclass(slots=True)
class PlanPart:
    """One request's share of a step: its next `num_tokens` tokens. At its end, `samples` rows of logits are wanted, and
    in front of these `prompt_rows`, for the log-probabilities of the prompt tokens that follow them."""

    request: Request
    start: int
    num_tokens: int
    samples: int  # 0: a prompt chunk before the last; 1: usual; 1 + k: verifies k drafts
    drafts: list[int] = field(default_factory=list)
    was_decoding: bool = False
    prompt_rows: int = 0
    new_blocks: Sequence[tuple[int, int]] = ()  # (group, block) taken for this part
    copies: Sequence[tuple[int, int, int]] = ()  # (group, source, destination): copy on write
    loads: Sequence[tuple[int, int, int]] = ()  # (group, host block, block)


@dataclass
class StepPlan:
    """Who runs in this step."""

    parts: list[PlanPart] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    saves: list[tuple[int, int, int]] = field(default_factory=list)  # of theirs: (group, block, host block)
    admitted: list[Request] = field(default_factory=list)
    bound_by: str | None = None  # the budget that kept work out: "tokens", "blocks", "requests", or None
    short: bool = False  # a running request needs blocks that come back only when a step is committed

    @property
    def num_tokens(self) -> int:
        return sum(p.num_tokens for p in self.parts)


@dataclass
class GroupBatch:
    """What the layers of one KV group need: where to write and where to read.

    `slot_mapping [T]` int64: block * block_size + offset of each new token. `block_table [R, max_blocks]` int32, padded
    with NULL_BLOCK; blocks that a window has left behind are NULL_BLOCK too. Before the forward, in this order: blocks
    saved to the host, copied, cleared, loaded from the host.
    """

    slot_mapping: Tensor
    block_table: Tensor
    copies: list[tuple[int, int]]
    cleared: list[int]
    saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)


class Draw(NamedTuple):
    """How a row's token is drawn: `generate`'s four common warpers, temperature 0 for the largest, and the seed."""

    temperature: float
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    seed: int  # as an int64


@dataclass(frozen=True)
class Draws:
    """What is wanted of the rows of a step where no more than their logits tells it, so that a runner may do it: each
    one's token and log-probability, drawn by its own of `rows`, or if these are None its largest token alone."""

    rows: Sequence[Draw] | None = None


@dataclass(frozen=True)
class Drawn:
    """Tokens `[S]` int64, -1 for a row with a NaN and -2 where none has a probability; their log-probabilities `[S]`
    float32, where they were wanted."""

    tokens: Tensor
    logprobs: Tensor | None = None

    def first(self, rows: int) -> Drawn:
        return Drawn(self.tokens[:rows], None if self.logprobs is None else self.logprobs[:rows])


@dataclass(frozen=True)
class Carried:
    """Input ids that only the device knows yet: at `places [C]` stand `tokens[rows]`, `rows [C]`, all int64. A negative
    one is of a request that fails."""

    places: Tensor
    rows: Tensor
    tokens: Tensor


@dataclass
class StepBatch:
    """A StepPlan as flat tensors; T query tokens of R requests, laid end to end. Built once per step, on the host.

    `input_ids [T]`, `position_ids [T]`, `logits_rows [S]` int64; `cu_seqlens_q [R + 1]`, `seq_lens [R]` (keys, this
    step's included) int32, both also as Python lists.
    """

    requests: list[Request]
    input_ids: Tensor
    position_ids: Tensor
    logits_rows: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    query_lens_list: list[int]
    seq_lens_list: list[int]
    groups: list[GroupBatch]
    block_size: int
    carried: Carried | None = None  # the input ids that are not known here
    draws: Draws | None = None  # a runner may then return what is drawn in place of the logits

    @property
    def best_is_enough(self) -> bool:
        """Whether nothing is wanted but each row's largest token."""
        return self.draws is not None and self.draws.rows is None


class Share(NamedTuple):
    """One request's part of a step: tokens from position `start` on, and how many new ones came of it."""

    request_id: str
    start: int
    num_tokens: int
    new_tokens: int
    decoding: bool  # else it is its prompt, or after a preemption what it had


class Entry(NamedTuple):
    """A request that joined the running ones; `created` is when it was submitted."""

    request_id: str
    created: float


class Exit(NamedTuple):
    """A request that ended with a step, and its finish_reason."""

    request_id: str
    reason: str


@dataclass(frozen=True)
class StepRecord:
    """What one step did, for whom, and which of the three budgets bound it.

    The budgets, as used and allowed: `query_tokens` and `tokens_allowed`, `blocks_used` and `blocks_allowed`, `running`
    and `requests_allowed`. Times are of `time.perf_counter()`; where steps overlap, the next one is planned and
    launched between this one's sampling and its commit, which begins at `ended - commit_s`.
    """

    step: int
    started: float
    ended: float
    plan_s: float
    build_s: float
    forward_s: float
    sample_s: float
    commit_s: float
    decode_tokens: int
    prefill_tokens: int
    tokens_allowed: int
    blocks_used: int
    blocks_cached: int
    blocks_allowed: int
    requests: int  # in this step
    running: int  # those that were left out of it too
    requests_allowed: int
    waiting: int
    sampled: int
    bound_by: str | None  # "tokens", "blocks", "requests"; None: no budget kept anybody out
    recovering: bool  # an earlier step raised, and its requests run in parts, without the others
    request_ids: tuple[str, ...]
    numbers: array[int]  # four for each of them, what `shares` unpacks: a quarter of the memory of objects
    admitted: tuple[Entry, ...]
    preempted_ids: tuple[str, ...]
    finished: tuple[Exit, ...]

    @property
    def query_tokens(self) -> int:
        return self.decode_tokens + self.prefill_tokens

    @property
    def preempted(self) -> int:
        return len(self.preempted_ids)

    @property
    def host_s(self) -> float:
        """The engine's own time."""
        return self.plan_s + self.build_s + self.commit_s

    @property
    def shares(self) -> Iterator[Share]:
        """Which request got which tokens, in the order of the step."""
        return (self._share(i) for i in range(len(self.request_ids)))

    def share_of(self, request_id: str) -> Share | None:
        """One request's part; None if it was not in this step."""
        return self._share(self.request_ids.index(request_id)) if request_id in self.request_ids else None

    def _share(self, i: int) -> Share:
        start, num_tokens, new_tokens, decoding = self.numbers[4 * i : 4 * i + 4]
        return Share(self.request_ids[i], start, num_tokens, new_tokens, bool(decoding))
