"""Models of real shapes with random weights, made on the GPU: nothing is fetched."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from hf_cb.bench.workload import BenchRequest, Workload

CONFIGS: dict[str, PreTrainedConfig] = {
    "Qwen3-0.6B": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "Llama-3.2-1B": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "tiny": LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    ),
}


def make(name: str, dtype: torch.dtype, device: str) -> Any:
    """A model in eval mode. No token ends an answer: random weights would end it anywhere."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def traffic(vocab: int, requests: int, least: int, most: int, seed: int = 0) -> Workload:
    """Prompts and answers of `least` to `most` tokens each, uniform."""
    rng = random.Random(seed)
    made = [
        BenchRequest([rng.randrange(vocab) for _ in range(rng.randint(least, most))], rng.randint(least, most))
        for _ in range(requests)
    ]
    return Workload(f"{requests} of {least} to {most} in and out", made)
