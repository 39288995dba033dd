"""Which models the paged path is known to be right for. Everything else is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_cb.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = frozenset(
    {"llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "smollm3"}
    | {
        "olmo",
        "olmo2",
        "olmo3",
        "granite",
        "starcoder2",
        "stablelm",
        "cohere",
        "cohere2",
        "helium",
        "arcee",
        "gpt_neox",
    }
)
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
IMPLEMENTATIONS = frozenset({"eager", "sdpa", "flex_attention"}) | {f"flash_attention_{v}" for v in (2, 3, 4)}


def check_supported(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError, naming the model and the reason, if the paged path may not be right for it."""
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; hf_cb runs decoder-only models.")
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head; load it with AutoModelForCausalLM.")
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{name} (model type {config.model_type!r}) is not supported yet; supported: {', '.join(sorted(FAMILIES))}."
        )
    implementation = config._attn_implementation
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"attn_implementation={implementation!r} is not supported; load {name} with one of "
            f"{', '.join(sorted(IMPLEMENTATIONS))}."
        )
    for rope_type in _rope_types(config):
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"{name} uses {rope_type!r} rotary scaling, which depends on the length of the whole batch and is not "
                f"supported yet; supported: {', '.join(sorted(ROPE_TYPES))}."
            )


def _rope_types(config: object) -> list[str]:
    """The rotary types in a config, of which some families have one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope] if "rope_type" in rope or "type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    return [str(r.get("rope_type") or r.get("type") or "default") for r in kinds]
