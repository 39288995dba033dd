"""A tiny model on bytes, so that any text goes in and comes out."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if enable_thinking %}<think>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, three special ones before them, and a chat template that knows tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


def byte_model(**changes: Any) -> PreTrainedModel:
    """Greedy unless told otherwise, and deaf to the end-of-sequence token."""
    model = make_model(vocab_size=259, max_position_embeddings=512, **changes)
    model.generation_config.eos_token_id = None
    model.generation_config.do_sample = False
    return model


def saying(tokenizer: Any, text: str) -> Any:
    """A logits processor that makes a model say the text, and end."""
    script = iter([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])

    def say(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([next(script)]), 0.0)

    return say
