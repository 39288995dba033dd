"""What a user passes as prompts, turned into lists of token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Number
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

from hf_cb.errors import PromptError
from hf_cb.text.chats import encode_chat
from hf_cb.text.media import TEXT_ONLY, media_inputs
from hf_cb.text.tokenizers import tokenizer_lock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt: TypeAlias = Any
"""Text, a chat, token ids (list, tuple, range, 1-D tensor or array), or a tokenizer's encoding of a text."""

_NOT_BATCHES = (bytes, bytearray, memoryview, set, frozenset, Mapping)


def iter_encoded(
    inputs: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    attention_mask: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[list[int] | Exception]:
    """Token ids of every prompt in `inputs`, in order and read lazily.

    Args:
        inputs: One prompt or any batch of prompts that `split_prompts` accepts.
        tokenizer: Needed as soon as one prompt is text or a chat.
        attention_mask: 1 where an id counts, 0 where it is padding; the shape of the ids, `[batch, length]`.
        chat_template_kwargs: Passed on to `apply_chat_template` (`tools`, `continue_final_message`, ...).

    Yields:
        One entry per prompt: its ids (at least one, none below 0), or the `TypeError` or `PromptError` that
        says what is wrong with this prompt alone.

    Raises:
        TypeError: `inputs` as a whole is nothing that holds prompts.
        PromptError: A prompt is text or a chat and there is no tokenizer, or the mask does not fit the batch.
    """
    for prompt in split_prompts(inputs, attention_mask):
        if isinstance(prompt, str) or _is_chat(prompt):
            _require_tokenizer(prompt, tokenizer)
        try:
            yield encode_prompt(prompt, tokenizer, chat_template_kwargs=chat_template_kwargs)
        except (TypeError, ValueError) as error:
            # The entry may live as long as its result; the frames of a traceback should not.
            yield error.with_traceback(None)


def encode_prompt(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of exactly one prompt, at least one of them and none below 0.

    Text gets the special tokens that `tokenizer(text)` adds. A chat goes through the chat template straight
    to ids, with a generation prompt unless `chat_template_kwargs` says otherwise. A mapping with `input_ids`
    and `attention_mask` loses its masked ids. Ids may come as a batch of one row.

    Raises:
        TypeError: The prompt, or one of its ids, has a wrong type.
        PromptError: No tokenizer for text or a chat, no ids, a negative id, or a prompt the tokenizer refuses.
    """
    if isinstance(prompt, str):
        ids = _encode_text(prompt, _require_tokenizer(prompt, tokenizer))
    elif _is_chat(prompt):
        encoding = encode_chat(prompt, _require_tokenizer(prompt, tokenizer), chat_template_kwargs or {})
        ids = _unpadded_ids(encoding) if isinstance(encoding, Mapping) else _id_list(encoding)
    elif isinstance(prompt, Mapping):
        ids = _unpadded_ids(prompt)
    else:
        ids = _id_list(prompt)
    if not ids:
        raise PromptError(f"the prompt {_short(prompt)} gives no token ids; pass at least one (BOS, say)")
    return ids


def split_prompts(inputs: Any, attention_mask: Any = None) -> Iterator[Prompt]:
    """Single prompts of any accepted batch, each ready for `encode_prompt`.

    A string, a chat (a list of dicts with a "role"), a list that starts with a number, and a 1-D tensor are
    one prompt. Other lists and sequences, 2-D tensors and arrays, and what a tokenizer returns for several
    texts are batches; so is any other iterable, which is read one prompt at a time and never stored. `[]` is
    an empty batch.

    With an `attention_mask` every prompt is a mapping with its row of ids and its row of the mask.

    Raises:
        TypeError: At the call, where `inputs` holds no prompts (None, a number, bytes, a set, ...).
        PromptError: Where the mask has another number of rows than `inputs`, or is given twice.
    """
    if isinstance(inputs, Mapping):
        inputs, attention_mask = _open_encoding(inputs, attention_mask)
    single = isinstance(inputs, str) or _is_chat(inputs) or _is_id_list(inputs)
    rows = [inputs] if single else _rows(inputs)
    if attention_mask is None:
        return iter(rows)
    masks = _mask_rows(attention_mask, single)
    if isinstance(rows, Sequence) and len(rows) != len(masks):
        raise PromptError(f"attention_mask has {len(masks)} rows for {len(rows)} prompts; it needs one for each")
    return ({"input_ids": row, "attention_mask": mask} for row, mask in zip(rows, masks, strict=True))


def _open_encoding(encoding: Mapping[str, Any], attention_mask: Any) -> tuple[Any, Any]:
    if "input_ids" not in encoding:
        remedy = "put the messages of a chat into a list" if "role" in encoding else "pass input_ids"
        raise TypeError(f"a mapping with the keys {_short(list(encoding))} holds no prompts; {remedy}")
    if media := media_inputs(encoding):
        raise PromptError(f"{', '.join(media)}: {TEXT_ONLY}")
    own_mask = encoding.get("attention_mask")
    if own_mask is not None and attention_mask is not None:
        raise PromptError("attention_mask is given twice: in the inputs and as an argument; pass one of them")
    return encoding["input_ids"], attention_mask if own_mask is None else own_mask


def _rows(inputs: Any) -> Iterable[Prompt]:
    if _is_tensor(inputs):
        if inputs.ndim == 2 or (inputs.ndim == 1 and _holds_objects(inputs)):
            return list(inputs.tolist())
        raise TypeError(f"a tensor of token ids has 1 or 2 dimensions, not {inputs.ndim}: {_short(inputs)}")
    if isinstance(inputs, Iterable) and not isinstance(inputs, _NOT_BATCHES):
        return inputs
    raise TypeError(
        f"inputs of type {type(inputs).__name__} hold no prompts: {_short(inputs)}; pass a string, a chat, "
        "token ids, a list of any of them, or what a tokenizer returns"
    )


def _mask_rows(attention_mask: Any, single: bool) -> list[Any]:
    if _is_tensor(attention_mask) and attention_mask.ndim > 0:
        attention_mask = attention_mask.tolist()
    if not _is_sequence(attention_mask):
        raise TypeError(f"attention_mask must be a list or a tensor, not {type(attention_mask).__name__}")
    flat = len(attention_mask) == 0 or _is_scalar(attention_mask[0])
    return [attention_mask] if single and flat else list(attention_mask)


def _is_tensor(value: Any) -> bool:
    """True for torch tensors, numpy arrays and their like, without importing any of them."""
    return hasattr(value, "tolist") and hasattr(value, "ndim")


def _holds_objects(array: Any) -> bool:
    return getattr(array.dtype, "kind", "i") in "OUST"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Number) or (_is_tensor(value) and value.ndim == 0)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _is_chat(value: Any) -> bool:
    return _is_sequence(value) and len(value) > 0 and isinstance(value[0], Mapping) and "role" in value[0]


def _is_id_list(value: Any) -> bool:
    if _is_tensor(value):
        return value.ndim == 1 and not _holds_objects(value)
    return _is_sequence(value) and len(value) > 0 and _is_scalar(value[0])


def _require_tokenizer(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        kind = "string" if isinstance(prompt, str) else "chat"
        raise PromptError(f"a {kind} needs a tokenizer: pass tokenizer=, or token ids instead of {_short(prompt)}")
    return tokenizer


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        with tokenizer_lock(tokenizer):
            encoding = tokenizer(text)
    except Exception as error:
        raise PromptError(f"the tokenizer refused {_short(text)}: {error}") from error
    return _id_list(encoding["input_ids"])


def _unpadded_ids(encoding: Mapping[str, Any]) -> list[int]:
    ids_given, mask_given = _open_encoding(encoding, None)
    ids = _id_list(ids_given)
    if mask_given is None:
        return ids
    mask = _one_row(mask_given, "an attention_mask of zeros and ones")
    if len(mask) != len(ids):
        raise PromptError(f"the attention_mask has {len(mask)} entries for {len(ids)} token ids: {_short(mask)}")
    if any(flag not in (0, 1) for flag in mask):
        raise PromptError(f"the attention_mask holds values besides 0 and 1: {_short(mask)}")
    if ids and not any(mask):
        raise PromptError(f"the attention_mask hides all {len(ids)} token ids of the prompt {_short(ids)}")
    return [token_id for token_id, keep in zip(ids, mask, strict=True) if keep]


def _one_row(value: Any, expected: str) -> list[Any]:
    """The elements of a flat sequence or tensor, or of its only row."""
    if _is_tensor(value) and value.ndim > 0:
        value = value.tolist()
    if not _is_sequence(value):
        raise TypeError(f"{_short(value)} ({type(value).__name__}) was passed where {expected} is needed")
    if len(value) == 1 and not _is_scalar(value[0]) and (_is_tensor(value[0]) or _is_sequence(value[0])):
        return _one_row(value[0], expected)
    return list(value)


def _id_list(value: Any) -> list[int]:
    ids = _one_row(value, "a prompt (a string, a chat or a list of token ids)")
    if not all(type(token_id) is int for token_id in ids):
        ids = [_token_id(element, position) for position, element in enumerate(ids)]
    if ids and min(ids) < 0:
        position = next(i for i, token_id in enumerate(ids) if token_id < 0)
        raise PromptError(
            f"token id {ids[position]} at position {position} is negative; a tokenizer gives ids from 0 up, "
            "and padding is marked by attention_mask"
        )
    return ids


def _token_id(element: Any, position: int) -> int:
    plain = element.tolist() if hasattr(element, "tolist") else element
    if not isinstance(plain, bool):
        try:
            return index(plain)
        except TypeError:
            pass
    remedy = "pass every row as a prompt of its own" if _is_sequence(plain) else "token ids are whole numbers"
    raise TypeError(f"{_short(plain)} ({type(plain).__name__}) at position {position} is not a token id; {remedy}")


def _short(value: Any) -> str:
    return reprlib.repr(value)
