"""What changes the scores of single tokens before any filter: penalties, bans and biases as plain numbers, and which
tokens they touch as a request grows, so that a step's work is that of its new tokens and not of the vocabulary.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Penalties:
    """In the order in which they are applied; the defaults change nothing."""

    repetition: float = 1.0  # tokens of prompt and output: a score is divided by it, or multiplied if it is negative
    banned: tuple[int, ...] = ()  # their scores are -infinity
    banned_before: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (length, tokens): while prompt and output are shorter
    bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its score)
    presence: float = 0.0  # taken from the score of each token of the output, once
    frequency: float = 0.0  # the same, as often as the token is there

    def amount(self, bias: float, count: int) -> float:
        """What is added to the score of a token that the output has `count` times."""
        return bias - self.frequency * count - self.presence * (count > 0)


class Edits(NamedTuple):
    """What penalties do to one row: the tokens (int32) whose scores are penalised, banned, or added to (float32)."""

    repetition: float
    repeated: array[int]
    banned: array[int]
    added: array[int]
    amounts: array[float]


class TokenCounts:
    """The tokens of one request that its penalties touch.

    It reads what is new in the request's ids, which only grow: so giving way, computing anew and forks (requests with
    counts of their own) cost nothing, and ids that are only drafted are seen by a copy.
    """

    def __init__(self, penalties: Penalties, prompt_length: int) -> None:
        self._penalties = penalties
        self._prompt_length = prompt_length
        self._length = 0  # of the ids that are counted
        self._known: set[int] = set()
        self._counts: dict[int, int] = {}
        self._bias = dict(penalties.bias)
        self._place = {token: i for i, token in enumerate(self._bias)}  # in the next two
        self._added, self._amounts = array("i", self._bias), array("f", self._bias.values())
        self._repeated = array("i")
        self._banned = array("i", penalties.banned)
        self._banned_at_first = [
            (length, array("i", penalties.banned + tokens)) for length, tokens in penalties.banned_before
        ]

    def edits(self, ids: Sequence[int], drafts: Sequence[int] = ()) -> Edits:
        """For the token after `ids` (prompt and output) and `drafts`. Good until the next call."""
        self._read(ids)
        if drafts:
            other = copy.deepcopy(self)
            return other.edits([*ids, *drafts])
        return Edits(self._penalties.repetition, self._repeated, self._banned_now(), self._added, self._amounts)

    def _read(self, ids: Sequence[int]) -> None:
        new = ids[self._length :]
        if self._penalties.repetition != 1:
            for token in new:
                if token not in self._known:
                    self._known.add(token)
                    self._repeated.append(token)
        if self._penalties.presence or self._penalties.frequency:
            for token in ids[max(self._length, self._prompt_length) :]:
                count = self._counts[token] = self._counts.get(token, 0) + 1
                amount = self._penalties.amount(self._bias.get(token, 0.0), count)
                place = self._place.setdefault(token, len(self._added))
                if place == len(self._added):
                    self._added.append(token)
                    self._amounts.append(amount)
                else:
                    self._amounts[place] = amount
        self._length = len(ids)

    def _banned_now(self) -> array[int]:
        applying = [tokens for length, tokens in self._banned_at_first if self._length < length]
        if len(applying) < 2:
            return applying[0] if applying else self._banned
        return sum(applying[1:], applying[0])
