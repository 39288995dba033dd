"""Recurrent layers beside attention (state spaces, gated delta nets, short convolutions), request by request.

Such a layer folds all tokens before into a state, so it cannot run over a step's concatenated tokens. Its module's
forward is driven instead: the tokens of each prompt chunk alone, with that request's own cache, and all decoding
requests as one batch, whose joined cache lasts as long as the same requests decode. The cache holds states only, since
keys and values are paged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_cb.attention.interception import Drive
from hf_cb.attention.masks import MaskMark
from hf_cb.core import Request
from hf_cb.models.driving import cache_argument, name_arguments
from hf_cb.models.lanes import Lanes
from hf_cb.steps import StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_recurrent(model: PreTrainedModel, attending: set[int]) -> list[nn.Module]:
    """The innermost modules that ask for a cache and do not attend; `attending` has the ids of those that do."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> bool:
        inside = [visit(child) for child in module.children()]
        if id(module) in attending or any(inside):
            return True
        if not cache_argument(module.__class__):
            return False
        found.append(module)
        return True

    visit(model)
    return list(dict.fromkeys(found))


@dataclass
class Piece:
    """Tokens that a recurrent module computes in one call: rows of a batch with one token each (`rows`, their places
    in the step), or one request's consecutive tokens [begin, end)."""

    cache: Cache
    rows: Tensor | None
    begin: int = 0
    end: int = 0
    is_first: bool = False  # a prompt's beginning: there is no state yet

    def singly(self) -> list[Piece]:
        """This piece for a module that restarts when it is given several tokens: token by token behind a state."""
        if self.is_first or self.rows is not None:
            return [self]
        return [replace(self, begin=i, end=i + 1) for i in range(self.begin, self.end)]

    def cut(self, value: Any, num_tokens: int) -> Any:
        """This piece's share of an argument `[1, T, ...]`; anything else is the same for all tokens."""
        if isinstance(value, MaskMark):
            return None  # nothing is padded
        if isinstance(value, tuple):
            return tuple(self.cut(v, num_tokens) for v in value)
        if not isinstance(value, Tensor) or value.shape[:2] != (1, num_tokens):
            return value
        return (
            value[:, self.begin : self.end] if self.rows is None else value[0, self.rows.to(value.device)].unsqueeze(1)
        )

    def put(self, whole: Tensor, part: Tensor) -> None:
        """The result of this piece, to its place in the result `[1, T, ...]` of the step."""
        if self.rows is None:
            whole[:, self.begin : self.end] = part
        else:
            whole[0, self.rows.to(whole.device)] = part[:, 0]


class RecurrentStates:
    """The states of all live requests, and the modules that use them."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        make_cache: Callable[[], Cache],
        restarting: Collection[type[nn.Module]] = (),
    ) -> None:
        self.modules = list(modules)
        self._make_cache = make_cache
        self._restarting = restarting  # classes that would forget their state, given several tokens
        self.lanes = Lanes()

    def forget(self, request: Request) -> None:
        self.lanes.forget(request)

    def drives(self, batch: StepBatch) -> dict[int, Drive]:
        """What runs in place of the modules' forward in this step."""
        pieces = self._pieces(batch)
        singly = [s for p in pieces for s in p.singly()] if self._restarting else []
        return {
            id(m): functools.partial(drive_pieces, type(m), singly if type(m) in self._restarting else pieces)
            for m in self.modules
        }

    def _pieces(self, batch: StepBatch) -> list[Piece]:
        decoding: dict[Request, int] = {}  # and its place in the step
        others: list[tuple[Request, int, int, bool]] = []
        begin = 0
        for request, count, length in zip(batch.requests, batch.query_lens_list, batch.seq_lens_list, strict=True):
            if count == length:  # from the start
                self.lanes.put(request, self._make_cache())
            if count == 1 and length > 1:
                decoding[request] = begin
            else:
                others.append((request, begin, begin + count, count == length))
            begin += count
        pieces = [Piece(self.lanes.one(r), None, begin, end, first) for r, begin, end, first in others]
        if decoding:
            cache, order = self.lanes.together(list(decoding))
            pieces.append(Piece(cache, torch.tensor([decoding[r] for r in order])))
        return pieces


def drive_pieces(
    cls: type,
    pieces: Sequence[Piece],
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Stands in for a module's forward: computes piece by piece, and puts the results `[1, T, ...]` together."""
    given = name_arguments(cls, args, kwargs)
    num_tokens = next(value for value in given.values() if isinstance(value, Tensor)).shape[1]
    whole: Tensor | None = None
    for piece in pieces:
        out = run_piece(cls, piece, forward, given, num_tokens)
        part = out if isinstance(out, Tensor) else out[0]
        if whole is None:
            whole = part.new_empty(1, num_tokens, *part.shape[2:])
        piece.put(whole, part)
    # what some return besides is their state, which nobody uses
    return whole if isinstance(out, Tensor) else (whole, *[None] * (len(out) - 1))


def run_piece(cls: type, piece: Piece, forward: Callable[..., Any], given: dict[str, Any], num_tokens: int) -> Any:
    """The module's own forward on a piece of the step's tokens, with the piece's cache."""
    share = {name: piece.cut(value, num_tokens) for name, value in given.items()}
    return forward(**share | {cache_argument(cls): piece.cache})
