"""Tiny random float32 models of real architectures, and what `generate` makes of a prompt: most tests' yardstick."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from hf_cb.models.twin import spread_weights

VOCAB = 128
SHAPE = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
WINDOW = dict(sliding_window=8)
HEAD = dict(head_dim=16)

# class prefix -> what its config needs beyond SHAPE; windows are switched on wherever the family has them
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": WINDOW | HEAD,
    "Qwen2": WINDOW | dict(use_sliding_window=True, max_window_layers=2),
    "Qwen3": WINDOW | HEAD | dict(use_sliding_window=True, max_window_layers=2),
    "Gemma": HEAD,
    "Gemma2": WINDOW | HEAD,
    "Gemma3": WINDOW | HEAD | dict(_config="Gemma3TextConfig", num_hidden_layers=6),
    "Phi": dict(num_key_value_heads=4),
    "Phi3": WINDOW,
    "SmolLM3": WINDOW | dict(use_sliding_window=True, no_rope_layer_interval=2),
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": WINDOW,
    "Granite": dict(attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=2.0),
    "Starcoder2": WINDOW,
    "StableLm": {},
    "Cohere": {},
    "Cohere2": WINDOW,
    "Helium": HEAD,
    "Arcee": {},
    "Ministral": WINDOW | HEAD,
    "GPTNeoX": dict(_drop=("num_key_value_heads",)),
}


def make_model(family: str = "Llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model with logits spread so far that greedy decoding meets no ties."""
    options = SHAPE | FAMILIES[family] | changes
    config_class = getattr(transformers, options.pop("_config", f"{family}Config"))
    for name in options.pop("_drop", ()):
        options.pop(name)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config_class(**options)).eval().float()
    return spread_weights(model)


def make_prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy(max_new_tokens: int = 12, **options: Any) -> GenerationConfig:
    """Greedy, and deaf to the end-of-sequence token unless that is asked for."""
    return GenerationConfig(**({"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": -1} | options))


def generate_alone(model: PreTrainedModel, prompt: list[int], config: GenerationConfig, **options: Any) -> list[int]:
    """What `model.generate` answers to this prompt alone, without the prompt."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **options)
    return out[0, len(prompt) :].tolist()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 128 tokens and a chat template: any text goes in, several tokens make one odd character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # 256 bytes would not fit into the tiny vocabulary, so these are the bytes of the texts that tests use
    text = "abcdefghijklmnopqrstuvwxyz ABCDEF.,:!?<>|/\n0123456789 \N{GRINNING FACE} é 日本"
    special = ["<pad>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=[], show_progress=False)
    tokenizer.train_from_iterator([text, "the END the answer and"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return fast
