"""Whether the engine answers a call of `generate` as `generate` would: the one place that decides.

Everything that is not known to be the same is left to the original loop, which is right by definition.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from transformers import DynamicCache

from hf_cb.manager.generating.call import Call
from hf_cb.manager.generating.padding import changes_answers, crosses
from hf_cb.manager.generating.rows import looks_across_rows
from hf_cb.manager.thread import in_generation_thread
from hf_cb.models.device import device_of
from hf_cb.models.guard import effective
from hf_cb.models.plan import model_length
from hf_cb.models.sharding import is_sharded

_CACHES = ("past_key_values", "cache", "cache_params")
# Other inputs that `generate` adds by itself, or that steer only its own loop
_NEUTRAL = frozenset({"use_cache", "logits_to_keep", "tokenizer", "return_dict"})
_CHECKED = frozenset({"attention_mask", "position_ids", *_CACHES})


def why_not(call: Call) -> str | None:
    """The first reason to leave a call to `generate`'s own loop, or None if the engine covers it."""
    reasons = (reason for check in _CHECKS for reason in check(call))
    return next(reasons, None)


def _surroundings(call: Call) -> Iterator[str]:
    if call.synced_gpus:
        yield "synced_gpus: the processes of a distributed model must step together"
    if torch.compiler.is_compiling():
        yield "it is being compiled"
    if torch.is_autocast_enabled(device_of(call.model).type):
        yield "inside torch.autocast, which the engine's thread does not see"
    if in_generation_thread():
        yield "called from within a step (by a processor or a hook), which cannot wait for another"


def _options(call: Call) -> Iterator[str]:
    config = call.config
    if config.is_assistant:
        yield "it drafts for assisted decoding"
    if config.cache_implementation not in (None, "dynamic"):
        yield f"cache_implementation={config.cache_implementation!r} is asked for"
    if config.guidance_scale not in (None, 1):
        yield f"guidance_scale={config.guidance_scale} runs the model in the middle of a step"
    for name in ("output_attentions", "output_hidden_states"):
        if call.wants(name):
            yield f"{name}=True"
    for name in ("output_scores", "output_logits"):
        if call.wants(name) and call.num_rows > 1 and call.pads_finished_rows:
            yield f"{name}=True of several rows: generate has them of rows that have ended, too"
        if call.wants(name) and call.is_watched:
            yield f"{name}=True beside a streamer or criteria that may look at them"
    if call.max_new_tokens < 1:
        yield "no criterion says how long it may become"
    if call.pads_finished_rows and call.pad_token_id is None:
        yield "there is no token to pad with"


def _inputs(call: Call) -> Iterator[str]:
    if call.model.config.is_encoder_decoder:
        yield "an encoder-decoder model"
    for name, value in call.inputs.items():
        if value is not None and not (isinstance(value, dict) and not value) and name not in _NEUTRAL | _CHECKED:
            yield f"{name}= is given"
    for name in _CACHES:
        cache = call.inputs.get(name)
        if cache is not None and (type(cache) is not DynamicCache or getattr(cache, "_is_user_defined", False)):
            yield f"{name}= is given"
    if (
        call.input_ids.dim() != 2
        or not call.input_ids.numel()
        or call.input_ids.dtype not in (torch.int64, torch.int32)
    ):
        yield f"input_ids are {tuple(call.input_ids.shape)} {call.input_ids.dtype}"


def _padding(call: Call) -> Iterator[str]:
    mask = call.mask
    if mask.shape != call.input_ids.shape:
        yield f"attention_mask is {tuple(mask.shape)}, and input_ids are {tuple(call.input_ids.shape)}"
        return
    if not bool(((mask == 0) | (mask == 1)).all()):
        yield "attention_mask has values other than 0 and 1"
    if bool((mask[:, -1] == 0).any()):
        yield "a row is padded on its right, where generate goes on after the padding"
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        yield "attention_mask has holes"
    if not _positions_are_usual(call):
        yield "position_ids= are given"
    if any(call.padding) and call.num_rows > 1 and crosses(call.model, call.width + call.max_new_tokens):
        yield "the longest row scales the rotary embeddings of all"
    if any(call.padding) and changes_answers(call.model):
        yield "this model answers otherwise with padding than without"


def _positions_are_usual(call: Call) -> bool:
    given = call.inputs.get("position_ids")
    if given is None:
        return True
    usual: Tensor = call.model._prepare_position_ids_for_generation(call.input_ids, {"attention_mask": call.mask})
    if given.shape[-2:] not in (usual.shape[-2:], (1, call.width)):
        return False
    return bool((given == usual).all())


def _length(call: Call) -> Iterator[str]:
    most = call.options.max_model_len or model_length(call.model)
    longest = call.width - min(call.padding) + call.max_new_tokens - 1
    if longest > most:
        yield f"it may become {longest} tokens long, and the engine goes up to {most}"


def _processors(call: Call) -> Iterator[str]:
    if call.num_rows > 1:
        for processor in call.processors:
            if looks_across_rows(processor):
                yield f"{type(processor).__name__} may depend on all rows of a batch"


def _model(call: Call) -> Iterator[str]:
    model = call.model
    if getattr(model.prepare_inputs_for_generation, "__func__", None) is not type(model).prepare_inputs_for_generation:
        yield "prepare_inputs_for_generation was replaced (prompt tuning does that)"
    if distributed.is_available() and distributed.is_initialized() and is_sharded(model):
        yield "the model is spread over several processes"
    everywhere = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    for module in model.modules():
        for hook in effective((*everywhere, module._forward_hooks, module._forward_pre_hooks)):
            yield f"a hook watches the model ({getattr(hook, '__qualname__', type(hook).__name__)})"
        if module.training and (what := _random_in_training(module)) is not None:
            yield f"the model is in training mode, and {what} is at work"


def _random_in_training(module: nn.Module) -> str | None:
    """What makes the outputs of a module in training mode other ones than in `eval()`."""
    name = type(module).__name__
    if isinstance(module, _DropoutNd):
        return name if module.p > 0 else None
    if isinstance(module, _NormBase) and module.track_running_stats:
        return name
    for key, value in vars(module).items():
        if isinstance(value, (int, float)) and value > 0 and any(word in key for word in ("drop", "jitter", "noise")):
            return f"{key} of {name}"
    return None


_CHECKS = (_surroundings, _options, _inputs, _padding, _length, _processors, _model)
