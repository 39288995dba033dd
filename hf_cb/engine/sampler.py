"""From logits to tokens: greedy rows all at once, every other row by its request's own processors; on a CPU with
compiled kernels, rows with no more than penalties and the four common warpers in the same call as the greedy ones.

A sampled token depends on the scores, the request's seed and its position, and on nothing else: one uniform number is
computed from seed and position, so a request's tokens survive any batching, preemption or late commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_cb.core import Request
from hf_cb.engine.logprobs import More, Row, tell
from hf_cb.errors import describe
from hf_cb.kernels.cpu import library as lib
from hf_cb.kernels.cpu import sampler as op
from hf_cb.penalties import Edits, TokenCounts
from hf_cb.seeds import uniform
from hf_cb.steps import Drawn, Draws, PlanPart


@dataclass(slots=True)
class Sampled:
    """One sampled token, or the exception that this request's own processors raised."""

    token_id: int
    logprob: float | None = None
    exception: Exception | None = None
    top: dict[int, float] | None = None  # this and what follows: where the request asks for it
    logits: Tensor | None = None
    scores: Tensor | None = None


@dataclass
class Drawing:
    """What a device has been told to sample: tokens `[S]` int64 there, -1 for a row with a NaN. `read` waits for them,
    and gives one list a part."""

    tokens: Tensor
    read: Callable[[], list[list[Sampled]]]


class SamplingStep(Protocol):
    """Samples the rows of a step: logits `[S, V]`; each part has `samples` rows, in order. One list a part, or Drawing.

    Where `draws` has said that the runner may draw them, it may get what was drawn.
    """

    def draws(self, parts: Sequence[PlanPart]) -> Draws | None: ...

    def sample(self, logits: Tensor | Drawn, parts: Sequence[PlanPart]) -> list[list[Sampled]] | Drawing: ...


class Sampler:
    """Greedy in one argmax; other rows one by one, with `generate`'s processors on the request's own ids.

    `native`: False leaves the compiled kernels alone.
    """

    def __init__(self, native: bool = True) -> None:
        found = lib.library() if native else None
        self._table = found.best if found else None
        self._workspace = lib.Workspace(found) if found else None

    def draws(self, parts: Sequence[PlanPart]) -> Draws | None:
        return Draws() if all(_only_its_token(p) for p in parts) else None

    def sample(self, logits: Tensor | Drawn, parts: Sequence[PlanPart]) -> list[list[Sampled]] | Drawing:
        if isinstance(logits, Drawn):
            tokens = iter(logits.tokens.tolist())
            return [[drawn(next(tokens), None) for _ in range(part.samples)] for part in parts]
        found = self._at_once(logits, parts)
        results: list[list[Sampled]] = []
        row = 0
        for part in parts:
            results.append([])
            ids = part.request.token_ids
            for i in range(part.samples):
                sampled = found.get(row)
                if sampled is None:
                    sampled = sample_row(logits[row], part.request, ids + part.drafts[:i])
                results[-1].append(sampled)
                row += 1
        return results

    def _at_once(self, logits: Tensor, parts: Sequence[PlanPart]) -> dict[int, Sampled]:
        """The rows that need no processors, by their number."""
        if self._table is not None and self._workspace is not None and logits.device.type == "cpu":
            draws = _draws(parts)
            scores = logits.float() if draws else logits
            tokens = op.sample(self._table, self._workspace, scores, draws, torch.get_num_threads()) if draws else []
            pairs = list(zip(draws, tokens, strict=True))
            found = {d.row: drawn(t.token, t.logprob if d.logprobs else None) for d, t in pairs}
            tell(scores, parts, found, {d.row: t.kept for d, t in pairs if not d.greedy})
            return found
        rows = [part.request for part in parts for _ in range(part.samples)]
        plain = [i for i, request in enumerate(rows) if request.params.is_plain]
        if not plain:
            return {}
        picked = logits if len(plain) == len(rows) else logits[torch.tensor(plain, device=logits.device)]
        found = dict(zip(plain, _greedy(picked, [rows[i] for i in plain]), strict=True))
        tell(logits, parts, found)
        return found


def _draws(parts: Sequence[PlanPart]) -> list[op.Draw]:
    draws: list[op.Draw] = []
    row = 0
    for part in parts:
        request, params = part.request, part.request.params
        for i in range(part.samples):
            if params.is_plain:
                draws.append(op.Draw(row, greedy=True, logprobs=params.logprobs))
            elif params.warpers is not None:
                w, greedy = params.warpers, not params.do_sample
                u = 0.0 if greedy else uniform(params.seed, len(request.token_ids) + i)
                settings = (u, w.top_p, w.min_p, w.top_k, w.temperature, greedy, params.logprobs)
                draws.append(op.Draw(row, *settings, *(edits_of(part, i) or ())))
            row += 1
    return draws


def edits_of(part: PlanPart, i: int) -> Edits | None:
    """What the request's penalties do to its i-th row; None if it has none."""
    request = part.request
    if request.params.penalties is None:
        return None
    if request.token_counts is None:
        request.token_counts = TokenCounts(request.params.penalties, len(request.prompt_ids))
    return request.token_counts.edits(request.token_ids, part.drafts[:i])


def drawn(token: int, logprob: float | None) -> Sampled:
    """The result of a row that a kernel has sampled: a negative token says why there is none."""
    if token >= 0:
        return Sampled(token, logprob)
    return Sampled(0, exception=_not_a_number() if token == op.NOT_A_NUMBER else _no_token())


def _only_its_token(part: PlanPart) -> bool:
    return not part.prompt_rows and (part.request.params.is_bare or not part.samples)


def _greedy(logits: Tensor, requests: list[Request]) -> list[Sampled]:
    scores = logits.float()  # as generate does; and argmax over bfloat16 is five times slower on a CPU
    tokens = scores.argmax(-1)
    best = scores.gather(1, tokens[:, None])[:, 0]
    out = [Sampled(t) for t in tokens.tolist()]
    if best.isnan().any():
        for sampled, value in zip(out, best.tolist(), strict=True):
            sampled.exception = _not_a_number() if value != value else None
    wanted = [i for i, r in enumerate(requests) if r.params.logprobs]
    if wanted:
        values = (best[wanted] - scores[wanted].logsumexp(-1)).tolist()
        for i, value in zip(wanted, values, strict=True):
            out[i].logprob = value
    return out


def sample_row(logits: Tensor, request: Request, ids: list[int]) -> Sampled:
    """The next token after `ids` from its logits `[V]`, by the request's own processors."""
    params = request.params
    scores = logits[None].float()
    try:
        if params.process is not None:
            scores = params.process(torch.tensor([ids], device=logits.device), scores)
            if scores.shape != (1, logits.shape[-1]):
                raise ValueError(
                    f"A logits processor of this request returned scores of shape {tuple(scores.shape)} instead of "
                    f"{(1, logits.shape[-1])}."
                )
        if bool(scores.isnan().any()):
            raise _not_a_number()
        u = uniform(params.seed, len(ids))
        token = pick(scores[0], u) if params.do_sample else int(scores[0].argmax())
        logprob = float(scores[0, token] - scores[0].logsumexp(-1)) if params.logprobs else None
        sampled = Sampled(token, logprob)
        if params.tells_more:
            row = Row(0, params, ids, scores=scores[0])
            More(logits[None], [row], torch.tensor([token], device=logits.device)).add_to({0: sampled})
    except Exception as error:  # a request's own processor: it ends that request and nobody else's
        return Sampled(0, exception=error)
    except BaseException as error:  # this thread gets no signals: it is the processor's own
        return Sampled(0, exception=RuntimeError(f"A processor of this request raised {describe(error)}."))
    return sampled


def _not_a_number() -> ValueError:
    return ValueError("The scores of this request's next token contain NaN: is the model or a processor broken?")


def _no_token() -> ValueError:
    return ValueError("No token has a probability above zero: the processors of this request exclude them all.")


def pick(scores: Tensor, u: float) -> int:
    """The token at which the cumulated probabilities of `scores [V]` pass u in [0, 1)."""
    if scores.device.type == "mps":
        scores = scores.cpu()  # it has no float64
    cumulated = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
    if not cumulated[-1].isfinite():
        raise _no_token()
    target = cumulated[-1] * u  # so that rounding in the sum cannot push u past the end
    token = int(torch.searchsorted(cumulated, target, right=True))
    return min(token, scores.shape[-1] - 1)
