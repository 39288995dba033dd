"""Which models are refused by name, whatever a probe of a few tokens would say."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

from hf_cb.errors import UnsupportedModelError
from hf_cb.models.device import device_of
from hf_cb.models.rope import BY_LENGTH, STATIC
from hf_cb.models.sharding import check_sharding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROPE_TYPES = STATIC | BY_LENGTH


def check_supported(model: PreTrainedModel, with_weights: bool = True) -> None:
    """Raises UnsupportedModelError, naming the model and the reason; `with_weights`: it is to run."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not callable(model):
        raise UnsupportedModelError(
            f"A loaded transformers model is needed, not {reprlib.repr(model)} ({name}): "
            f"AutoModelForCausalLM.from_pretrained(...) loads one."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; hf_cb runs decoder-only models.")
    if not getattr(model, "can_generate", bool)():
        raise UnsupportedModelError(f"{name} has no language-model head; load it with AutoModelForCausalLM.")
    implementation = str(getattr(config, "_attn_implementation", ""))
    if implementation.startswith("paged|"):
        plain = implementation.removeprefix("paged|")
        raise UnsupportedModelError(
            f"{name} was loaded with attn_implementation={implementation!r}, with which its own forward is not causal. "
            f"hf_cb needs nothing of the kind: call model.set_attn_implementation({plain!r})."
        )
    if with_weights and device_of(model).type == "meta":
        raise UnsupportedModelError(f"{name} has shapes and no weights (device meta); load it with from_pretrained.")
    check_sharding(model)
    for rope_type in (*_rope_types(config), *_rope_types(config.get_text_config())):
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"{name} uses {rope_type!r} rotary scaling, which may depend on the length of the whole batch and is "
                f"not known here; known: {', '.join(sorted(ROPE_TYPES))}."
            )


def _rope_types(config: object) -> list[str]:
    """The rotary types in a config, of which some families have one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope] if "rope_type" in rope or "type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    return [str(r.get("rope_type") or r.get("type") or "default") for r in kinds]
