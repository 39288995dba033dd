"""Sampling on a GPU: the tokens stay there, as the next step's inputs, and the host reads them when it commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hf_cb.attention.triton import device_problem, package_problem
from hf_cb.core import Request
from hf_cb.engine.logprobs import More, numbers_of, rows_that_tell, tell
from hf_cb.engine.penalising import penalised
from hf_cb.engine.sampler import Drawing, Sampled, Sampler, drawn, edits_of, is_plain, sample_row
from hf_cb.kernels.device import fetched, sent
from hf_cb.kernels.reference.sampling import best_tokens
from hf_cb.steps import PlanPart

# logits [S, V] and each row's temperature, top_k, top_p, min_p, seed, position [S] -> tokens, log-probabilities [S]
Draw = Callable[..., tuple[Tensor, Tensor]]


class DeviceSampler(Sampler):
    """Greedy rows, and with `draw` those with the four common warpers, are sampled where the logits are, after their
    penalties.

    Rows with other processors are sampled one by one: which way a row goes depends on its own request alone.
    """

    def __init__(self, draw: Draw | None = None) -> None:
        super().__init__(native=False)
        self._draw = draw

    def sample(self, logits: Tensor, parts: Sequence[PlanPart]) -> list[list[Sampled]] | Drawing:
        counts = [part.samples for part in parts]
        rows = [(part, i) for part in parts for i in range(part.samples)]
        if logits.dim() == 1:
            return _drawing(logits, None, rows, counts)
        here = [i for i, (part, _) in enumerate(rows) if self._is_here(part.request)]
        if len(here) == len(rows):
            tokens, logprobs = self._at_device(logits, rows)
            telling = rows_that_tell(parts, here, {})
            more = More(logits, telling, tokens[numbers_of(telling, tokens.device)]) if telling else None
            return _drawing(tokens, logprobs, rows, counts, more)
        found: dict[int, Sampled] = {}
        if here:
            chosen = [rows[i] for i in here]
            tokens, logprobs = self._at_device(logits[sent(torch.tensor(here), logits.device)], chosen)
            found = dict(zip(here, _read(tokens, logprobs, chosen), strict=True))
            tell(logits, parts, found)
        for i, (part, k) in enumerate(rows):
            if i not in found:
                found[i] = sample_row(logits[i], part.request, part.request.token_ids + part.drafts[:k])
        return _by_part([found[i] for i in range(len(rows))], counts)

    def _is_here(self, request: Request) -> bool:
        params = request.params
        return is_plain(request) or (params.warpers is not None and (self._draw is not None or not params.do_sample))

    def _at_device(self, logits: Tensor, rows: list[tuple[PlanPart, int]]) -> tuple[Tensor, Tensor | None]:
        edits = [edits_of(part, i) for part, i in rows]
        if any(edits):
            logits = penalised(logits, edits)
        if not any(part.request.params.do_sample for part, _ in rows):
            return _greedy(logits, any(part.request.params.logprobs for part, _ in rows))
        assert self._draw is not None
        return self._draw(logits, *_settings(rows, logits.device))


def _greedy(logits: Tensor, logprobs: bool) -> tuple[Tensor, Tensor | None]:
    tokens, best = best_tokens(logits)
    return tokens, best.float() - logits.float().logsumexp(-1) if logprobs else None


def _settings(rows: list[tuple[PlanPart, int]], device: torch.device) -> tuple[Tensor, ...]:
    """Temperature, top_k, top_p, min_p, seed and position of each row; greedy ones have temperature 0."""
    floats: list[list[float]] = []
    longs: list[list[int]] = []
    for part, i in rows:
        w, place = part.request.params.warpers, len(part.request.token_ids) + i
        if w is None or not part.request.params.do_sample:
            floats.append([0.0, 1.0, 0.0])
            longs.append([0, 0, place])
        else:
            floats.append([w.temperature, w.top_p, w.min_p])
            longs.append([w.top_k, _signed(part.request.params.seed), place])
    temperature, top_p, min_p = sent(torch.tensor(floats).T.contiguous(), device)
    top_k, seeds, positions = sent(torch.tensor(longs).T.contiguous(), device)
    return temperature, top_k.int(), top_p, min_p, seeds, positions


def _signed(seed: int) -> int:
    """Its lowest 64 bits, as an int64."""
    return (seed + 2**63) % 2**64 - 2**63


def _drawing(
    tokens: Tensor,
    logprobs: Tensor | None,
    rows: list[tuple[PlanPart, int]],
    counts: Sequence[int],
    more: More | None = None,
) -> Drawing:
    """The copy to the host starts at once, and only `read` waits for it."""
    wait = fetched([tokens] if logprobs is None else [tokens, logprobs])

    def read() -> list[list[Sampled]]:
        there, *values = wait()
        found = _read(there, values[0] if values else None, rows)
        if more is not None:
            more.add_to(dict(enumerate(found)))
        return _by_part(found, counts)

    return Drawing(tokens, read)


def _read(tokens: Tensor, logprobs: Tensor | None, rows: list[tuple[PlanPart, int]]) -> list[Sampled]:
    values = [None] * len(rows) if logprobs is None else logprobs.tolist()
    return [
        drawn(token, value if part.request.params.logprobs else None)
        for token, value, (part, _) in zip(tokens.tolist(), values, rows, strict=True)
    ]


def _by_part(sampled: Sequence[Sampled], counts: Sequence[int]) -> list[list[Sampled]]:
    return [list(sampled[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]


def sampler_for(device: torch.device) -> Sampler:
    """The usual sampler of a model on that device."""
    if device.type == "cpu":
        return Sampler()
    if package_problem() or device_problem(device):  # rows that are not greedy are sampled one by one
        return DeviceSampler()
    from hf_cb.kernels.triton import sampling

    def draw(logits: Tensor, temperature: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        top_k, top_p, min_p, seeds, positions = rest
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        tokens = sampling.sample(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds,
            positions=positions,
            logprobs_out=logprobs,
        )
        return tokens, logprobs

    return DeviceSampler(draw)
