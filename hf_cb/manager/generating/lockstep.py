"""A streamer and the caller's stopping criteria, asked in the caller's thread, step by step, with the very tensors that
`generate` shows them, while the engine runs ahead.

What a criterion decides about a row depends on nothing but tokens that are known by then, and changes no other row's
tokens. So a row may run on until the decision is there, and what it has too much is dropped. That holds for any
criterion, also one that remembers what it saw of each row (as evaluation harnesses' do).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_cb.manager.generating.call import Call
from hf_cb.manager.mailbox import Stream


class RowEnded(Exception):
    """The engine has ended a row that was to go on, so that this step's token never comes."""

    def __init__(self, row: int, step: int) -> None:
        self.row, self.step = row, step


def follow(
    call: Call, streams: Sequence[Stream], news: queue.SimpleQueue[None], cancel: Callable[[int], None]
) -> Tensor:
    """The finished batch `[R, L]`.

    Args:
        streams: the tokens of each row, as they come.
        news: gets something whenever there may be more of them.
        cancel: ends the request of a row whose tokens are no longer wanted.

    Raises:
        RowEnded: a row has ended too early.
    """
    ids, pad = call.input_ids, call.pad_token_id
    unfinished = torch.ones(call.num_rows, dtype=torch.bool, device=ids.device)
    for step in range(call.max_new_tokens):
        wanted = unfinished.tolist() if call.pads_finished_rows else [True] * call.num_rows
        column = [_token(streams, row, step, news) if wanted[row] else pad for row in range(call.num_rows)]
        tokens = torch.tensor(column, device=ids.device)
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        still = unfinished & ~call.criteria(ids, None)
        if call.streamer is not None:
            call.streamer.put(tokens.cpu())
        if not still.any():
            break
        if call.pads_finished_rows:
            for row in (unfinished & ~still).nonzero().flatten().tolist():
                cancel(row)
        unfinished = still
    if call.streamer is not None:
        call.streamer.end()
    return ids


def _token(streams: Sequence[Stream], row: int, step: int, news: queue.SimpleQueue[None]) -> int:
    """A row's token, waited for."""
    stream = streams[row]
    while len(stream.token_ids) <= step:
        if stream.output is not None and len(stream.token_ids) <= step:
            raise RowEnded(row, step)
        news.get()
    return stream.token_ids[step]
