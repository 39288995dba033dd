"""A call of `generate` by the engine: its rows as requests, their tokens as the tensor that `generate` returns."""

from __future__ import annotations

import logging
import queue
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_cb.core import GenerationOutput
from hf_cb.errors import HfCbError, OptionError, UnsupportedModelError, describe
from hf_cb.manager.generating.call import Call
from hf_cb.manager.generating.coverage import why_not
from hf_cb.manager.generating.keeping import open_for
from hf_cb.manager.generating.lockstep import RowEnded, follow
from hf_cb.manager.generating.rows import RowRecipe, looks_across_rows
from hf_cb.manager.handle import Handle
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.manager.session import complete

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("hf_cb")

_refused: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()  # with the reason


def generate(call: Call, original: Callable[[], Any]) -> Any:
    """What `original`, the decoding loop of `generate`, returns for this call; by the engine where it is covered."""
    reason = _refused.get(call.model) or why_not(call)
    if reason is None:
        try:
            return _run(call)
        except _LeftToOriginal as left:
            reason = str(left)
    return leave(reason, original)


def leave(reason: str, original: Callable[[], Any]) -> Any:
    """The original loop, for this reason."""
    logger.debug("model.generate runs in its own loop: %s", reason)
    return original()


def forget_refusal(model: PreTrainedModel) -> None:
    """It may be tried again."""
    _refused.pop(model, None)


class _LeftToOriginal(Exception):
    """The engine does not take a call that looked covered; nobody has seen a token of it. The message says why."""


def _run(call: Call) -> Any:
    with ExitStack() as stack:
        try:
            manager = stack.enter_context(open_for(call))
        except Exception as error:  # whatever it is, the original loop does without a manager
            if isinstance(error, (UnsupportedModelError, OptionError)):
                _refused[call.model] = str(error)
            logger.warning("model.generate of %s is not accelerated: %s", type(call.model).__name__, error)
            raise _LeftToOriginal(str(error)) from error
        handles: list[Handle] = []
        try:
            for first in range(0, call.num_rows, call.rows_per_prompt):
                handles.append(_submit(call, manager, first))
            stack.enter_context(complete(manager))
            if call.is_watched:
                return _as_asked(call, _watched(call, manager, handles))
            outputs = _finished(call, handles)
            return _as_asked(call, _padded(call, outputs), outputs)
        finally:
            for handle in handles:
                if not handle.done:
                    handle.cancel()


def _submit(call: Call, manager: ContinuousBatchingManager, first: int) -> Handle:
    """The rows of one prompt, as one request."""
    try:
        return manager.submit_ids(call.prompts[first], RowRecipe(call, first), bounded=False)
    except HfCbError as error:
        raise _LeftToOriginal(str(error)) from error


def _finished(call: Call, handles: list[Handle]) -> list[GenerationOutput]:
    outputs = [output for handle in handles for output in handle.outputs()]
    for output in outputs:
        if output.finish_reason not in ("stop", "length"):
            _fail(call, output)
    return outputs


def _padded(call: Call, outputs: list[GenerationOutput]) -> Tensor:
    longest = max(len(output.generated_tokens) for output in outputs)
    rows = [o.generated_tokens + [call.pad_token_id] * (longest - len(o.generated_tokens)) for o in outputs]
    new = torch.tensor(rows, device=call.input_ids.device)  # int64, so int32 prompts become that as in `generate`
    return torch.cat([call.input_ids, new], dim=1)


def _as_asked(call: Call, sequences: Tensor, outputs: Sequence[GenerationOutput] = ()) -> Any:
    if not call.config.return_dict_in_generate:
        return sequences
    found: dict[str, Any] = {}
    for name in ("scores", "logits"):
        rows = [getattr(output, name) for output in outputs if getattr(output, name) is not None]
        if rows:  # as many steps in each: coverage sees to it
            found[name] = tuple(torch.stack(step).to(sequences.device) for step in zip(*rows, strict=True))
    return GenerateDecoderOnlyOutput(sequences=sequences, **found)


def _watched(call: Call, manager: ContinuousBatchingManager, handles: list[Handle]) -> Tensor:
    news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake() -> None:
        if news.empty():  # one wake for a step's news of all rows
            news.put(None)

    for handle in handles:
        handle.mailbox.add_waker((None, wake))
    requests = [request for handle in handles for request in handle.mailbox.requests]
    streams = [stream for handle in handles for stream in handle.mailbox.streams]
    try:
        return follow(call, streams, news, lambda row: manager.cancel_request(requests[row].request_id))
    except RowEnded as ended:
        output = streams[ended.row].output
        assert output is not None
        _fail(call, output, seen=ended.step > 0)


def _fail(call: Call, output: GenerationOutput, seen: bool = False) -> NoReturn:
    """The engine has not finished a row. The original loop tries again, unless somebody has seen tokens of the call:
    a streamer, a criterion (`seen`) or a processor of the caller's, whose own error it probably is."""
    error = output.exception or RuntimeError(
        output.error or f"A row of model.generate has ended: {output.finish_reason}."
    )
    if seen or any(looks_across_rows(processor) for processor in call.processors):
        raise error
    logger.warning("model.generate starts again in its own loop: %s", describe(error))
    raise _LeftToOriginal(describe(error)) from error
