"""A model's shapes without its weights: from its config alone, on the device "meta"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hf_cb.errors import OptionError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TRACEABLE_EXPERTS = "batched_mm"  # the way to compute experts that asks no tensor for its values


def outline(source: str, dtype: str = "auto", **options: Any) -> PreTrainedModel:
    """The causal language model of a folder or Hub id, as `from_pretrained` would build it, with no memory behind it.

    Args:
        source: folder or Hub id; of the latter only the config is fetched.
        dtype: "auto" is the config's own, or float32 where it names none.
        options: for `AutoConfig.from_pretrained`, such as `revision`.

    Raises:
        OptionError: there is no such model, or its config makes no causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source, **options)
        _forget_padding(config)
        wanted = config.dtype or config.get_text_config().dtype if dtype == "auto" else getattr(torch, dtype)
        trust = {"trust_remote_code": True} if options.get("trust_remote_code") else {}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=wanted or torch.float32, **trust).eval()
    except (OSError, ValueError, ImportError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"no causal language model could be made of {source} to plan with: {reason}") from error
    if type(model)._can_set_experts_implementation():
        model.set_experts_implementation(TRACEABLE_EXPERTS)
    return model


def weight_bytes(model: PreTrainedModel) -> int:
    """Of all parameters, each once, in the dtype that the model has."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _forget_padding(config: PretrainedConfig) -> None:
    """Some forwards look for padding among their input's values, which it has none of."""
    for part in (config, config.get_text_config()):
        part.pad_token_id = None
