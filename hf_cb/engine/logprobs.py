"""What a request may be told besides its tokens: alternatives and their log-probabilities, those of its prompt, logits.

All of it is computed where the logits are, on the rows of the requests that ask, and read by the host later. Nobody
else pays.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_cb.core import Request, SamplingParams
from hf_cb.kernels.device import fetched, sent
from hf_cb.steps import Drawn, PlanPart

if TYPE_CHECKING:
    from hf_cb.engine.sampler import Sampled

SCORED_ROWS = 256  # most rows of prompts in a step: of each there are logits of the whole vocabulary
SLICE = 64  # rows of a prompt that are float32 at a time

Scores = dict[Request, list[dict[int, float]]]


@dataclass
class Row:
    """A sampled row that tells more.

    Args:
        number: in the step's logits.
        ids: what the processors see.
        kept: how many of the best tokens its warpers leave, where that is known and matters.
        scores: `[V]` float32, what the processors have made of the logits, where they have been called.
    """

    number: int
    params: SamplingParams
    ids: Sequence[int]
    kept: int | None = None
    scores: Tensor | None = None

    def needs_scores(self) -> bool:
        """Whether its logits do not tell what is asked: then the processors are called, unless they have been."""
        params = self.params
        if self.scores is not None or params.process is None or params.output_scores:
            return params.process is not None
        return not params.raw_logprobs and self.kept is None

    def processed(self, logits: Tensor) -> Tensor:
        """Scores `[V]` from its logits `[V]`."""
        if self.scores is not None or self.params.process is None:
            return logits if self.scores is None else self.scores
        return self.params.process(torch.tensor([self.ids], device=logits.device), logits[None].clone())[0]


class More:
    """What some sampled rows tell. Computed at once, without waiting for the device; `add_to` waits.

    Args:
        logits: of the step, `[S, V]`.
        rows: those that tell more.
        tokens: `[n]` int64, what was sampled in these rows, where the logits are.
    """

    def __init__(self, logits: Tensor, rows: Sequence[Row], tokens: Tensor) -> None:
        self._rows = rows
        every = [row.number for row in rows] == list(range(len(logits)))  # then nothing is copied
        raw = (logits if every else logits[numbers_of(rows, logits.device)]).float()
        chosen = tokens.clamp(min=0)  # a row without a token has an error, and tells nothing
        scores = {i: row.processed(raw[i]) for i, row in enumerate(rows) if row.needs_scores()}
        self._logits = {i: raw[i].clone() for i, row in enumerate(rows) if row.params.output_logits}
        self._scores = {i: scores.get(i, raw[i]).clone() for i, row in enumerate(rows) if row.params.output_scores}
        most = min(max(row.params.top_logprobs or 0 for row in rows), raw.shape[1])
        alone = [i for i in scores if not rows[i].params.raw_logprobs]
        together = [i for i in range(len(rows)) if i not in alone]
        pieces = [_look(scores[i][None], chosen[i : i + 1], most) for i in alone]
        if together and alone:
            places = sent(torch.tensor(together), logits.device)
            pieces.append(_look(raw[places], chosen[places], most))
        elif together:
            pieces.append(_look(raw, chosen, most))
        self._order, self._look = [*alone, *together], Look(pieces)

    def add_to(self, sampled: Mapping[int, Sampled]) -> None:
        """Completes these results, which are by the number of their row."""
        for i, (own, best, ids) in zip(self._order, self._look.read(), strict=True):
            row, params = self._rows[i], self._rows[i].params
            result = sampled[row.number]
            if result.exception is not None:
                continue
            result.logits, result.scores = self._logits.get(i), self._scores.get(i)
            count, temperature = params.top_logprobs, 1.0
            if row.kept is not None and result.logprob is not None:  # of the logits, where those do
                count = None if count is None else min(count, row.kept)
                if params.warpers is not None and not row.needs_scores():
                    temperature = params.warpers.temperature
            elif params.logprobs:
                result.logprob = own
            if count is not None and result.logprob is not None:
                values = [result.logprob + (value - own) / temperature for value in best]
                result.top = _best(ids[:count], values, result.token_id, result.logprob)


def tell(
    logits: Tensor, parts: Sequence[PlanPart], found: Mapping[int, Sampled], kept: Mapping[int, int] | None = None
) -> None:
    """Completes what was sampled in a step, by the number of its row. `kept`: as in Row, by the same number."""
    rows = rows_that_tell(parts, found, kept or {})
    if rows:
        tokens = sent(torch.tensor([found[row.number].token_id for row in rows]), logits.device)
        More(logits, rows, tokens).add_to(found)


def rows_that_tell(parts: Sequence[PlanPart], among: Container[int], kept: Mapping[int, int]) -> list[Row]:
    rows: list[Row] = []
    number = 0
    for part in parts:
        request, params = part.request, part.request.params
        if params.tells_more:
            numbers = [(number + i, part.drafts[:i]) for i in range(part.samples) if number + i in among]
            left = {} if params.raw_logprobs or params.penalties is not None else kept
            rows += [Row(n, params, request.token_ids + drafts, left.get(n)) for n, drafts in numbers]
        number += part.samples
    return rows


def numbers_of(rows: Sequence[Row], device: torch.device) -> Tensor:
    return sent(torch.tensor([row.number for row in rows]), device)


class Look:
    """Log-probabilities on their way to the host."""

    def __init__(self, pieces: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._wait = fetched([torch.cat(column) for column in zip(*pieces, strict=True)])

    def read(self) -> Iterator[tuple[float, list[float], list[int]]]:
        """Row by row the chosen token's, the best ones', and whose these are; waits until they are there."""
        return zip(*(tensor.tolist() for tensor in self._wait()), strict=True)


def _look(scores: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of scores `[n, V]`: the log-probabilities of `tokens [n]`, and the best `most` of each row `[n, most]`, with
    their ids."""
    total = scores.logsumexp(-1, keepdim=True)
    best, ids = scores.topk(most)
    return (scores.gather(1, tokens[:, None]) - total)[:, 0], best - total, ids


def _best(ids: Sequence[int], values: Sequence[float], token: int, own: float) -> dict[int, float]:
    """The tokens that have a probability, best first, and the one that was chosen."""
    found = {i: value for i, value in zip(ids, values, strict=False) if value > -float("inf")}
    found[token] = own  # keeps its place; else it is the last
    return found


# ------------------------------------------------------------------------------------------------------------- prompts


def prompt_rows(request: Request, start: int, count: int) -> int:
    """How many rows of logits are wanted for the prompt of a request whose next `count` tokens are computed: a row
    tells of the token that follows, and none is told of twice."""
    if not request.scores_prompt:
        return 0
    first, end = max(start, len(request.prompt_logprobs)), min(start + count, len(request.prompt_ids) - 1)
    return max(0, end - first)


@dataclass
class Prompts:
    """The log-probabilities of the prompt tokens in one step. Computed at once; `read` waits for the device."""

    parts: list[PlanPart] = field(default_factory=list)
    look: Look | None = None

    def read(self) -> Scores:
        """By request, for each of its prompt tokens the chosen and the best; oldest first."""
        if self.look is None:
            return {}
        told: Scores = {part.request: [] for part in self.parts}
        owners = (part.request for part in self.parts for _ in range(part.prompt_rows))
        found = zip(owners, _tokens(self.parts), self.look.read(), strict=True)
        for request, token, (own, best, ids) in found:
            count = request.params.prompt_logprobs or 0
            told[request].append(_best(ids[:count], best, token, own))
        return told


def split(logits: Tensor | Drawn, parts: Sequence[PlanPart]) -> tuple[Tensor | Drawn, Prompts]:
    """A step's logits as those of the rows that are sampled `[S, V]`, and what its prompts are told."""
    scored = [part for part in parts if part.prompt_rows]
    if not scored or isinstance(logits, Drawn):  # prompts are told from logits alone
        return logits, Prompts()
    sampled: list[int] = []
    told: list[int] = []
    row = 0
    for part in parts:
        told += range(row, row + part.prompt_rows)
        row += part.prompt_rows + part.samples
        sampled += range(row - part.samples, row)
    most = min(max(part.request.params.prompt_logprobs or 0 for part in scored), logits.shape[1])
    tokens, places = (sent(torch.tensor(ids), logits.device) for ids in (_tokens(scored), told))
    pieces = zip(places.split(SLICE), tokens.split(SLICE), strict=True)
    look = Look([_look(logits[rows].float(), chosen, most) for rows, chosen in pieces])
    return logits[sent(torch.tensor(sampled, dtype=torch.long), logits.device)], Prompts(scored, look)


def _tokens(parts: Sequence[PlanPart]) -> list[int]:
    """The prompt tokens that are told of, which follow the rows that are computed for them."""
    tokens: list[int] = []
    for part in parts:
        end = part.start + part.num_tokens - part.samples + 1
        tokens += part.request.prompt_ids[end - part.prompt_rows : end]
    return tokens
