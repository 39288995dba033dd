"""Sampling on a GPU: the tokens stay there, as the next step's inputs, and the host reads them when it commits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hf_cb.core import Request
from hf_cb.engine.logprobs import More, numbers_of, rows_that_tell, tell
from hf_cb.engine.penalising import penalised
from hf_cb.engine.sampler import Drawing, Sampled, Sampler, drawn, edits_of, sample_row
from hf_cb.kernels.device import fetched, sent
from hf_cb.kernels.reference.sampling import best_tokens
from hf_cb.models.drawing import DrawTokens, draw_for, settings_for
from hf_cb.steps import Draw, Drawn, Draws, PlanPart

GREEDY = Draw(0.0, 0, 1.0, 0.0, 0)
HOTTEST, MOST = torch.finfo(torch.float32).max, torch.iinfo(torch.int32).max  # what a row's settings can be


class DeviceSampler(Sampler):
    """Greedy rows, and with `draw` those with the four common warpers, are sampled where the logits are, after their
    penalties.

    Rows with other processors are sampled one by one: which way a row goes depends on its own request alone.
    """

    def __init__(self, draw: DrawTokens | None = None) -> None:
        super().__init__(native=False)
        self._draw = draw

    def draws(self, parts: Sequence[PlanPart]) -> Draws | None:
        found = super().draws(parts)
        if found is not None or self._draw is None:
            return found
        rows: list[Draw] = []
        for part in parts:
            params = part.request.params
            if part.prompt_rows or params.penalties is not None or params.tells_more or not self._is_here(part.request):
                return None
            rows += [_draw_of(part.request)] * part.samples
        return Draws(rows)

    def sample(self, logits: Tensor | Drawn, parts: Sequence[PlanPart]) -> list[list[Sampled]] | Drawing:
        counts = [part.samples for part in parts]
        rows = [(part, i) for part in parts for i in range(part.samples)]
        if isinstance(logits, Drawn):
            return _drawing(logits, rows, counts)
        here = [i for i, (part, _) in enumerate(rows) if self._is_here(part.request)]
        if len(here) == len(rows):
            there = self._at_device(logits, rows)
            telling = rows_that_tell(parts, here, {})
            more = More(logits, telling, there.tokens[numbers_of(telling, logits.device)]) if telling else None
            return _drawing(there, rows, counts, more)
        found: dict[int, Sampled] = {}
        if here:
            chosen = [rows[i] for i in here]
            there = self._at_device(logits[sent(torch.tensor(here), logits.device)], chosen)
            found = dict(zip(here, _read(there, chosen), strict=True))
            tell(logits, parts, found)
        for i, (part, k) in enumerate(rows):
            if i not in found:
                found[i] = sample_row(logits[i], part.request, part.request.token_ids + part.drafts[:k])
        return _by_part([found[i] for i in range(len(rows))], counts)

    def _is_here(self, request: Request) -> bool:
        params = request.params
        return params.is_plain or (params.warpers is not None and (self._draw is not None or not params.do_sample))

    def _at_device(self, logits: Tensor, rows: list[tuple[PlanPart, int]]) -> Drawn:
        edits = [edits_of(part, i) for part, i in rows]
        if any(edits):
            logits = penalised(logits, edits)
        if not any(part.request.params.do_sample for part, _ in rows):
            return _greedy(logits, any(part.request.params.logprobs for part, _ in rows))
        assert self._draw is not None
        places = [len(part.request.token_ids) + i for part, i in rows]
        return self._draw(logits, settings_for([_draw_of(part.request) for part, _ in rows], places, logits.device))


def _greedy(logits: Tensor, logprobs: bool) -> Drawn:
    tokens, best = best_tokens(logits)
    return Drawn(tokens, best.float() - logits.float().logsumexp(-1) if logprobs else None)


def _draw_of(request: Request) -> Draw:
    w, params = request.params.warpers, request.params
    if w is None or not params.do_sample:
        return GREEDY
    seed = (params.seed + 2**63) % 2**64 - 2**63  # its lowest 64 bits
    return Draw(min(w.temperature, HOTTEST), min(w.top_k, MOST), w.top_p, w.min_p, seed)


def _drawing(here: Drawn, rows: list[tuple[PlanPart, int]], counts: Sequence[int], more: More | None = None) -> Drawing:
    """The copy to the host starts at once, and only `read` waits for it."""
    logprobs = here.logprobs if any(part.request.params.logprobs for part, _ in rows) else None
    wait = fetched([here.tokens] if logprobs is None else [here.tokens, logprobs])

    def read() -> list[list[Sampled]]:
        found = _read(Drawn(*wait()), rows)
        if more is not None:
            more.add_to(dict(enumerate(found)))
        return _by_part(found, counts)

    return Drawing(here.tokens, read)


def _read(there: Drawn, rows: list[tuple[PlanPart, int]]) -> list[Sampled]:
    if there.logprobs is None:
        return [drawn(token, None) for token in there.tokens.tolist()]
    values = there.logprobs.tolist()
    return [
        drawn(token, value if part.request.params.logprobs else None)
        for token, value, (part, _) in zip(there.tokens.tolist(), values, rows, strict=True)
    ]


def _by_part(sampled: list[Sampled], counts: Sequence[int]) -> list[list[Sampled]]:
    return [sampled[a:b] for a, b in pairwise(accumulate(counts, initial=0))]


def sampler_for(device: torch.device) -> Sampler:
    """The usual sampler of a model on that device."""
    return Sampler() if device.type == "cpu" else DeviceSampler(draw_for(device))
