"""A tiny random float32 model of the same class: the same wiring with short windows, on which a path can be tried in
milliseconds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hf_cb.models.rope import forgets_prompt

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MAX_PARAMETERS = 30_000_000  # a config that does not shrink below this has sizes that we do not know
WINDOW = 8
VOCAB = 128
ORIGINAL_LENGTH = 24  # of a sequence, before rotary scaling

# attribute -> its size in the twin, where the config has it and it is larger
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "head_dim", "v_head_dim", "hidden_size_per_layer_input"), 16),
    "qk_rope_head_dim": 16,  # as head_dim: the rotary tables of MLA have that size
    **dict.fromkeys(("qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "linear_num_value_heads"), 16),
    **dict.fromkeys(("linear_num_key_heads", "n_groups"), 4),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("max_window_layers", "first_k_dense_replace"), 1),
}
# the same for the parts that see or hear: no text goes through them, so they need only be buildable, and small
_PART_SIZES = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "hidden_dim", "output_dim", "width", "dim"), 64),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "projector_hidden_size", "adapter_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim", "ffn_dim"), 96),
    **dict.fromkeys(("projector_intermediate_size", "adapter_intermediate_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "depth", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "attention_heads", "n_head"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("vocab_size", "image_size", "max_position_embeddings", "codebook_size", "base_channels"), 128),
    "head_dim": 16,
}
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def make_twin(model: PreTrainedModel) -> PreTrainedModel | None:
    """The twin of a model, or None if its config cannot be shrunk that way. torch's random state is left alone."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            twin = _build(model, shrink(model.config))
            if twin is not None and forgets_prompt(twin):
                twin = _build(model, shrink(model.config, crossing=False))
    except Exception:  # whatever a config class objects to: there is no twin then
        return None
    return twin


def _build(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel | None:
    torch.manual_seed(0)
    if _num_parameters(model, config) > MAX_PARAMETERS:
        return None
    twin = type(model)._from_config(config, dtype=torch.float32).eval()
    return spread_weights(twin)


def spread_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Random weights that spread the logits: a wrong path shows in the numbers, and greedy decoding meets no ties."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def shrink(config: PretrainedConfig, crossing: bool = True) -> PretrainedConfig:
    """A copy of a config with small sizes, short windows, and one layer or two of each kind.

    `crossing`: a few tokens outgrow the original maximum of rotary scaling.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = "sdpa" if "flash" in str(config._attn_implementation) else config._attn_implementation
    text = config.get_text_config()
    for name in _HEADS:
        heads = getattr(text, name, None)
        if heads is not None:
            kv_heads = getattr(text, "num_key_value_heads", None)
            setattr(text, name, 4)
            if kv_heads is not None:
                text.num_key_value_heads = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
            break
    kinds = getattr(text, "layer_types", None)
    for name in _LAYERS:
        if getattr(text, name, None) is not None:
            setattr(text, name, len(_few_layers(kinds)) if kinds else min(4, getattr(text, name)))
            break
    if kinds:
        with contextlib.suppress(AttributeError):  # where it is computed from other fields
            text.layer_types = _few_layers(kinds)
    _shrink_fields(text, _SIZES)
    _shrink_rope(text, ORIGINAL_LENGTH if crossing else 10**6)
    for name in _SPECIAL_TOKENS:
        if getattr(text, name, None) is not None:
            setattr(text, name, 2)
    for part in _parts_beside(config, text):
        _shrink_part(part)
    return config


def _shrink_fields(config: Any, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        value = _get(config, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > size:
            with contextlib.suppress(AttributeError):  # where it is computed from other fields
                setattr(config, name, size)


def _parts_beside(config: PretrainedConfig, text: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """The configs within a config that are not its text part, nor hold it."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and part is not text:
            holds_text = any(getattr(part, inner, None) is text for inner in part.sub_configs)
            yield from _parts_beside(part, text) if holds_text else [part]


def _shrink_part(part: PretrainedConfig) -> None:
    _shrink_fields(part, _PART_SIZES)
    for name in part.sub_configs:
        if getattr(part, name, None) is not None:
            _shrink_part(getattr(part, name))


def _shrink_rope(text: Any, original: int) -> None:
    """The tables of frequencies get the twin's size, and change at a length of `original`."""
    rope = _get(text, "rope_parameters") or {}
    for parameters in [rope, *(p for p in rope.values() if isinstance(p, dict))]:
        if parameters.get("rope_type") == "dynamic":
            text.max_position_embeddings = original
        if "original_max_position_embeddings" in parameters:
            parameters["original_max_position_embeddings"] = original
        for name in ("short_factor", "long_factor"):
            if name in parameters:
                parameters[name] = parameters[name][: _frequencies(text, parameters)]
        if section := parameters.get("mrope_section"):  # how many of the frequencies are time, height and width
            half = _frequencies(text, parameters)
            small = [max(1, part * half // sum(section)) for part in section]
            parameters["mrope_section"] = [half - sum(small[1:]), *small[1:]]
    if _get(text, "original_max_position_embeddings") is not None:
        text.original_max_position_embeddings = original


def _frequencies(text: Any, parameters: dict[str, Any]) -> int:
    head_dim = _get(text, "head_dim") or text.hidden_size // text.num_attention_heads
    return int(head_dim * parameters.get("partial_rotary_factor", 1)) // 2


def _get(config: Any, name: str) -> Any:
    """An attribute, or None: some raise when asked for what differs between layers."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _few_layers(kinds: list[str]) -> list[str]:
    """The shortest beginning with all kinds in it, and one layer more."""
    end = max(kinds.index(kind) for kind in set(kinds)) + 2
    return list(kinds[:end])


def _num_parameters(model: PreTrainedModel, config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in type(model)(config).parameters())
