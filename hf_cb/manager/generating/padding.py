"""Whether a model answers a padded row as it answers the row alone: most do, some do not, so it is measured.

The engine computes rows without their padding. Where that is not what `generate` computes (a state that runs through
the padding, positions that it shifts, chunks that are counted from its first token), padded calls are left alone.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_cb.errors import UnsupportedModelError
from hf_cb.manager.openmp import single_threaded
from hf_cb.manager.probe import TOLERANCE
from hf_cb.manager.training_mode import in_eval
from hf_cb.models.device import device_of
from hf_cb.models.rope import first_crossing
from hf_cb.models.twin import VOCAB, make_twin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("hf_cb")

LENGTHS, NEW_TOKENS = (13, 6), 4  # past a twin's window of 8, and within its rotary scaling's first length

_lock = threading.RLock()
_found: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def changes_answers(model: PreTrainedModel) -> bool:
    """Whether rows are answered otherwise with padding than without; found out once for a model."""
    with _lock:
        if model not in _found:
            twin = make_twin(model)
            found = None if twin is None else _differs(twin)
            _found[model] = _differs(model) is not False if found is None else found
        return _found[model]


def crosses(model: PreTrainedModel, length: int) -> bool:
    """Whether rows of one batch, the longest of `length` tokens, may scale their rotary embeddings by each other's
    length."""
    try:
        first = first_crossing(model)
    except UnsupportedModelError:  # as its manager will say
        return False
    return first is not None and length > first


def _differs(model: PreTrainedModel) -> bool | None:
    """None if it cannot be told."""
    try:
        with in_eval(model), single_threaded():
            longest, padded = _logits(model, LENGTHS)
            (alone,) = _logits(model, LENGTHS[1:])
    except Exception as error:  # whatever stands in the way of a padded batch of text
        logger.info("Nothing tells what padding does to %s: %s", type(model).__name__, error)
        return None
    off = float((padded - alone).abs().max() / alone.abs().max().clamp(min=1e-6))
    return not off <= TOLERANCE.get(model.dtype, 8e-2)


def _logits(model: PreTrainedModel, lengths: tuple[int, ...]) -> list[Tensor]:
    """What `generate`'s own loop computes for a batch of prompts that end alike, `[NEW_TOKENS, V]` for each."""
    vocab = min(VOCAB, model.get_input_embeddings().weight.shape[0])
    device, width = device_of(model), max(lengths)
    tokens = torch.randint(3, vocab, (max(LENGTHS),), generator=torch.Generator().manual_seed(0))[-width:]
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    out = model.generate(
        (tokens * mask).to(device),
        attention_mask=mask.to(device),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        output_hidden_states=True,  # which the engine has not: so an accelerated model's own loop runs
        return_dict_in_generate=True,
    )
    return list(torch.stack(out.logits, dim=1).float())
