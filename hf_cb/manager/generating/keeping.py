"""The manager that a model's `generate` calls share: made for the first, kept with the model, and replaced when calls
need more room.

Its KV cache has room for what calls have asked for and no more, since whoever calls `generate` may want the memory for
something else (a training step). Its thread runs only while calls do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_cb.manager import kept
from hf_cb.manager.generating.call import Call
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.manager.session import running
from hf_cb.models.device import device_of
from hf_cb.models.plan import Need

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST = Need(8192, 64)


@dataclass
class _Room:
    """What a manager was made for, and what the calls that are running need of it."""

    made_for: Need
    made_on: tuple[Any, ...]
    tokens: int = 0
    seqs: int = 0

    def has(self, need: Need) -> bool:
        return self.tokens + need.tokens <= self.made_for.tokens and self.seqs + need.seqs <= self.made_for.seqs

    def take(self, need: Need) -> None:
        self.tokens += need.tokens
        self.seqs += need.seqs

    def give_back(self, need: Need) -> None:
        self.tokens -= need.tokens
        self.seqs -= need.seqs


_rooms: weakref.WeakKeyDictionary[ContinuousBatchingManager, _Room] = weakref.WeakKeyDictionary()


@contextmanager
def open_for(call: Call) -> Iterator[ContinuousBatchingManager]:
    """A running manager with room for the call.

    Raises:
        UnsupportedModelError, OptionError: the model, or the options of `accelerate`, allow none.
    """
    tokens = sum(call.width - pad + call.max_new_tokens for pad in call.padding)
    need = Need(tokens, call.num_rows)
    taken: list[_Room] = []

    def choose() -> ContinuousBatchingManager:
        manager, room = _with_room(call, need)
        room.take(need)
        taken.append(room)
        return manager

    try:
        with running(choose) as manager:
            manager.loop.post(lambda: _forget_prefixes(manager))
            yield manager
    finally:
        for room in taken:
            room.give_back(need)


def _with_room(call: Call, need: Need) -> tuple[ContinuousBatchingManager, _Room]:
    """Called by one thread at a time."""
    manager = kept.kept_manager(call.model, kept.GENERATE)
    room = None if manager is None else _rooms.get(manager)
    usable = manager is not None and manager.config == call.options and manager.loop.fatal_error is None
    usable = usable and room is not None and room.made_on == _shape(call.model)
    if manager is not None and room is not None and usable and room.has(need):
        return manager, room
    tokens, seqs = (room.tokens, room.seqs) if room is not None and usable else (0, 0)
    if not seqs:
        kept.forget(call.model, kept.GENERATE)  # its memory is free before the next one takes its own
        manager = None
    wanted = Need(_round_up(max(LEAST.tokens, tokens + need.tokens)), _round_up(max(LEAST.seqs, seqs + need.seqs)))
    room = _Room(wanted, _shape(call.model))
    manager = ContinuousBatchingManager(call.model, None, call.options, None, room.made_for)
    _rooms[manager] = room
    kept.keep(call.model, manager, kept.GENERATE)
    return manager, room


def _shape(model: PreTrainedModel) -> tuple[Any, ...]:
    """What may change between calls (`to()`, `resize_token_embeddings`), and a manager cannot follow."""
    return model.dtype, device_of(model), model.get_input_embeddings().weight.shape


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _forget_prefixes(manager: ContinuousBatchingManager) -> None:
    """Between two calls the weights may have been written to in ways that leave no trace (`.data`)."""
    if not manager.engine.has_work:
        manager.engine.kv.drop_cache()
