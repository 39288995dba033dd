"""Every accepted form of prompts gives the same ids, and a bad prompt spoils only itself."""

from collections import UserDict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_cb.text.prompts import encode_prompt, iter_encoded, split_prompts
from hf_cb.text.tokenizers import tokenizer_lock

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'refused' %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ m['role'][0] }}:{{ m['content'] }}{% if not (loop.last and tail) %};{% endif %}{% endfor %}"
    "{% if tools %}T{{ tools | length }}{% endif %}{% if add_generation_prompt %}a:{% endif %}"
)
BOS = 256


def list_encoded(*args: Any, **kwargs: Any) -> list[list[int] | Exception]:
    return list(iter_encoded(*args, **kwargs))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte of the text, after a BOS; the chat template writes a BOS too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>"])
    core.post_processor = processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", BOS)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", pad_token="<s>")
    wrapped.chat_template = TEMPLATE
    return wrapped


def chat(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


PADDED = [[0, 0, 5, 6], [7, 8, 9, 1]]
LEFT_MASK = [[0, 0, 1, 1], [1, 1, 1, 1]]
UNPADDED = [[5, 6], [7, 8, 9, 1]]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([1, 2, 3], [[1, 2, 3]]),
        ((1, 2, 3), [[1, 2, 3]]),
        (range(3), [[0, 1, 2]]),
        (deque([1, 2]), [[1, 2]]),
        ([np.int64(4), torch.tensor(5)], [[4, 5]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        (np.array([1, 2], dtype=np.uint16), [[1, 2]]),
        ([[1, 2], (3,), range(2)], [[1, 2], [3], [0, 1]]),
        ([torch.tensor([1, 2]), np.array([3]), torch.tensor([[4, 5]])], [[1, 2], [3], [4, 5]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ({"input_ids": [1, 2]}, [[1, 2]]),
        ({"input_ids": [[1, 2], [3]]}, [[1, 2], [3]]),
        (UserDict(input_ids=torch.tensor(PADDED), attention_mask=torch.tensor(LEFT_MASK)), UNPADDED),
        ([{"input_ids": [0, 1], "attention_mask": [0, 1]}, [7]], [[1], [7]]),
        ([], []),
        (torch.zeros(0, 4, dtype=torch.long), []),
    ],
    ids=repr,
)
def test_ids_in_every_form(inputs: Any, expected: list[list[int]]) -> None:
    encoded = list_encoded(inputs)
    assert encoded == expected
    assert all(type(token_id) is int for ids in encoded for token_id in ids)


@pytest.mark.parametrize("as_array", [list, torch.tensor, np.array], ids=["list", "tensor", "array"])
@pytest.mark.parametrize(
    ("ids", "mask", "expected"),
    [
        (PADDED, LEFT_MASK, UNPADDED),
        ([[5, 6, 0, 0], [7, 8, 9, 1]], [[1, 1, 0, 0], [1, 1, 1, 1]], UNPADDED),
        ([[5, 0, 6, 0]], [[1, 0, 1, 0]], [[5, 6]]),
        (PADDED, [[False, False, True, True], [True] * 4], UNPADDED),
        ([0, 5, 6], [0, 1, 1], [[5, 6]]),
        ([0, 5, 6], [[0, 1, 1]], [[5, 6]]),
    ],
    ids=["left", "right", "holes", "bool", "flat", "flat with one row"],
)
def test_masked_ids_are_dropped(as_array: Any, ids: Any, mask: Any, expected: list[list[int]]) -> None:
    assert list_encoded(as_array(ids), attention_mask=as_array(mask)) == expected


def test_what_a_tokenizer_returns(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["a", "longer text"]
    expected = [tokenizer(text)["input_ids"] for text in texts]
    for side in ("left", "right"):
        tokenizer.padding_side = side
        for options in ({}, {"padding": True}, {"padding": True, "return_tensors": "pt"}):
            assert list_encoded(tokenizer(texts, **options)) == expected
    assert list_encoded(tokenizer("a")) == expected[:1]
    assert list_encoded([tokenizer(text, return_tensors="pt") for text in texts]) == expected
    assert encode_prompt(tokenizer("a", return_tensors="np")) == expected[0]


def test_text_gets_the_tokenizers_own_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = tokenizer("hi")["input_ids"]
    assert expected[0] == BOS
    for inputs in ("hi", ["hi"], ("hi",), np.array(["hi"]), iter(["hi"])):
        assert list_encoded(inputs, tokenizer) == [expected]
    assert list_encoded(["hi", [1, 2], chat("x")], tokenizer)[:2] == [expected, [1, 2]]


def test_a_chat_becomes_ids_with_one_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = tokenizer("u:hi;a:")["input_ids"]
    assert expected.count(BOS) == 1
    assert encode_prompt(chat("hi"), tokenizer) == expected
    assert list_encoded(chat("hi"), tokenizer) == [expected]
    assert list_encoded([chat("hi"), tuple(chat("hi"))], tokenizer) == [expected, expected]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"add_generation_prompt": False}, "u:hi;"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "u:hi;T1a:"),
        ({"continue_final_message": True, "tail": True}, "u:hi"),
        ({"return_dict": True, "return_tensors": "pt"}, "u:hi;a:"),
        ({"chat_template": "{{ bos_token }}own"}, "own"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_chat_template_kwargs(tokenizer: PreTrainedTokenizerFast, options: dict[str, Any], text: str) -> None:
    assert encode_prompt(chat("hi"), tokenizer, chat_template_kwargs=options) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ([], ValueError, "no token ids"),
        (torch.tensor([]), ValueError, "no token ids"),
        ([1, "x"], TypeError, "'x' .str. at position 1"),
        ([1, 2.0], TypeError, "2.0 .float. at position 1"),
        ([1, None], TypeError, "None"),
        ([True, False], TypeError, "True .bool."),
        (torch.tensor([True]), TypeError, "bool"),
        (torch.tensor([1.0, 2.0]), TypeError, "float"),
        (["a", "b"], TypeError, "'a' .str. at position 0"),
        (torch.tensor([[1, 2], [3, 4]]), TypeError, "every row as a prompt of its own"),
        ([3, -1], ValueError, "token id -1 at position 1 is negative"),
        (7, TypeError, "7 .int. was passed where a prompt"),
        (None, TypeError, "None"),
        (b"bytes", TypeError, "bytes"),
        ({"text": "x"}, TypeError, "'text'"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, ValueError, "1 entries for 2"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, ValueError, "hides all 2"),
        ({"input_ids": [1, 2], "attention_mask": [0.0, -9.0]}, ValueError, "besides 0 and 1"),
        (chat("x", role="refused"), ValueError, "unknown role"),
        ("\ud800", ValueError, "refused"),
    ],
    ids=repr,
)
def test_a_bad_prompt_spoils_only_itself(
    tokenizer: PreTrainedTokenizerFast, bad: Any, kind: type[Exception], message: str
) -> None:
    first, error, last = list_encoded([[1, 2], bad, "hi"], tokenizer)
    assert first == [1, 2] and last == tokenizer("hi")["input_ids"]
    assert isinstance(error, kind) and error.__traceback__ is None
    with pytest.raises(kind, match=message):
        raise error
    with pytest.raises(kind, match=message):
        encode_prompt(bad, tokenizer)


def test_messages_stay_short(tokenizer: PreTrainedTokenizerFast) -> None:
    for bad in ([*range(9000), "x" * 9000], chat("y" * 9000, role="refused"), torch.zeros(9000)):
        (error,) = list_encoded([bad], tokenizer)
        assert isinstance(error, Exception) and len(str(error)) < 300


def test_an_empty_text_is_an_error_where_the_tokenizer_adds_nothing(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert list_encoded([""], tokenizer) == [[BOS]]
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    error, other = list_encoded(["", "a"], tokenizer)
    assert isinstance(error, ValueError) and "no token ids" in str(error) and isinstance(other, list)


@pytest.mark.parametrize(
    "inputs",
    [None, 5, 1.5, True, b"x", {1, 2}, {"role": "user", "content": "x"}, {}, object()],
)
def test_inputs_that_hold_no_prompts(inputs: Any) -> None:
    with pytest.raises(TypeError, match="hold"):
        list_encoded(inputs)


@pytest.mark.parametrize("dimensions", [0, 3])
def test_a_tensor_with_a_wrong_number_of_dimensions(dimensions: int) -> None:
    with pytest.raises(TypeError, match=f"1 or 2 dimensions, not {dimensions}"):
        list_encoded(torch.zeros([1] * dimensions, dtype=torch.long))


@pytest.mark.parametrize("prompt", ["text", chat("x")], ids=["text", "chat"])
def test_text_needs_a_tokenizer(prompt: Any) -> None:
    for call in (encode_prompt, list_encoded, lambda p: list_encoded([[1], p])):
        with pytest.raises(ValueError, match="needs a tokenizer: pass tokenizer="):
            call(prompt)


def test_a_chat_needs_a_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    error, other = list_encoded([chat("x"), [1]], tokenizer)
    assert isinstance(error, ValueError) and "no chat template" in str(error) and other == [1]
    with pytest.raises(TypeError, match="tokenize=False"):
        encode_prompt(chat("x"), tokenizer, chat_template_kwargs={"tokenize": False, "chat_template": TEMPLATE})


@pytest.mark.parametrize(
    ("inputs", "mask", "kind", "message"),
    [
        (PADDED, LEFT_MASK[:1], ValueError, "1 rows for 2 prompts"),
        (iter(PADDED), LEFT_MASK[:1], ValueError, "shorter"),
        (PADDED, 1, TypeError, "attention_mask must be"),
        ({"input_ids": PADDED, "attention_mask": LEFT_MASK}, LEFT_MASK, ValueError, "given twice"),
    ],
    ids=["rows", "lazy rows", "number", "twice"],
)
def test_masks_that_do_not_fit(inputs: Any, mask: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        list_encoded(inputs, attention_mask=mask)


def test_lazy_inputs_are_read_one_at_a_time() -> None:
    read = 0

    def endless() -> Iterator[list[int]]:
        nonlocal read
        while True:
            read += 1
            yield [read]

    prompts = split_prompts(endless())
    assert read == 0
    assert [encode_prompt(next(prompts)) for _ in range(3)] == [[1], [2], [3]]
    assert read == 3
    with pytest.raises(TypeError):
        split_prompts(None)  # at the call, not at the first prompt


def test_threads_that_share_a_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Without the lock, truncation set for one thread's chat cuts another thread's text."""
    text = "a text that is longer than the truncated chats " * 4
    expected = tokenizer(text)["input_ids"]

    def encode(worker: int) -> bool:
        options = {"truncation": True, "max_length": 5 + worker}
        if worker % 2:
            return all(encode_prompt(text, tokenizer) == expected for _ in range(300))
        chats = (encode_prompt(chat(text), tokenizer, chat_template_kwargs=options) for _ in range(100))
        return all(len(ids) == 5 + worker for ids in chats)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(encode, range(8)))


def test_one_lock_per_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert tokenizer_lock(tokenizer) is tokenizer_lock(tokenizer) is not tokenizer_lock(other)
