"""A loaded model as a GGUF file for llama.cpp, for the architectures whose tensors map one to one.

Without a vocabulary: the benchmark speaks in token ids.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_cb.bench.measured import CannotRun
from hf_cb.errors import missing

# model_type -> GGUF's architecture; those of "llama" turn pairs of neighbours, so queries and keys are laid out anew
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Any, path: Path, dtype: torch.dtype) -> None:
    """Writes the file, whole or not at all; matrices in `dtype`, vectors in float32.

    Raises:
        CannotRun: an architecture, a variant or a dtype that this does not know, or no package `gguf`.
    """
    try:
        import gguf
    except ImportError as error:
        raise CannotRun(missing("making a GGUF file of the model", "demo", error)) from error
    config = model.config
    kinds = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    kind = gguf.GGMLQuantizationType[kinds[str(dtype).removeprefix("torch.")]]
    architecture = ARCHITECTURES.get(config.model_type)
    rope = getattr(config, "rope_parameters", None) or {}
    if architecture is None or rope.get("rope_type", "default") != "default" or config.hidden_act != "silu":
        raise CannotRun(f"no GGUF file is made here of such a {config.model_type}: give one by --peer-model")
    tensors = list(_tensors(model, architecture))
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(partial, architecture)
    _describe(writer, config, rope)
    for name, tensor in tensors:
        if tensor.dim() == 1 or kind.name == "F32":
            writer.add_tensor(name, tensor.float().numpy())
        else:  # numpy has no bfloat16: as bytes
            bytes_of = tensor.to(dtype).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, np.ascontiguousarray(bytes_of), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)


def _describe(writer: Any, config: Any, rope: dict[str, Any]) -> None:
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _tensors(model: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    tied = getattr(model.config, "tie_word_embeddings", False)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().cpu()
        if name in OUTSIDE:
            if not (tied and name == "lm_head.weight"):
                yield OUTSIDE[name], tensor
            continue
        parts = name.split(".")  # model.layers.N.(...).weight
        inside = ".".join(parts[3:-1])
        if parts[:2] != ["model", "layers"] or inside not in INSIDE:
            raise CannotRun(f"no GGUF file is made here of a model with {name}: give one by --peer-model")
        if architecture == "llama" and parts[-2] in heads:
            tensor = _pairs(tensor, heads[parts[-2]])
        yield f"blk.{parts[2]}.{INSIDE[inside]}.{parts[-1]}", tensor


def _pairs(tensor: Tensor, heads: int) -> Tensor:
    """From halves that turn together to neighbours that do, in each head."""
    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape).contiguous()
