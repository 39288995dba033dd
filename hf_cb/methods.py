"""The calls that a model gets: arguments as a user writes them, turned into what `manager.calls` works on."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_cb.config import EngineConfig
from hf_cb.core import Delta, GenerationOutput
from hf_cb.manager import calls, kept, session
from hf_cb.manager.generating import run as routing
from hf_cb.manager.generating.call import Call
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.manager.ranks import following
from hf_cb.models.support import check_supported
from hf_cb.text.media import media_inputs

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

logger = logging.getLogger("hf_cb")


@dataclass
class Settings:
    """What hf_cb was switched on with, for one model or for all."""

    config: EngineConfig
    tokenizer: PreTrainedTokenizerBase | None = None

    def config_of(self, config: Any, generation_config: Any = None) -> EngineConfig:
        """The engine's options for a call that was given `config`."""
        if config is None:
            config = getattr(generation_config, "continuous_batching_config", None)
        return self.config if config is None else EngineConfig.of(config, base=self.config)

    def tokenizer_of(self, model: Any, tokenizer: Any) -> Any:
        """The one given, or the one from `accelerate`, or the one in the model's own folder."""
        tokenizer = tokenizer or self.tokenizer or _folder_tokenizer(model)
        is_processor = any(cls.__name__ == "ProcessorMixin" for cls in type(tokenizer).__mro__)
        return tokenizer.tokenizer if is_processor else tokenizer


def generate_batch(
    settings: Settings,
    self: Any,
    inputs: Any = None,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generation_kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Generates for many prompts at once by continuous batching: all results by request id, in the order of the inputs.

    Args:
        inputs: text, a chat, token ids, or a batch of any of them; tensors; what a tokenizer returns.
        generation_config: one for all, or a list with one for each input.
        continuous_batching_config: transformers' ContinuousBatchingConfig or an hf_cb.EngineConfig.
        record_timestamps: give each token's time.
        progress_bar: show finished requests and tokens per second.
        persistent_manager: keep the manager and its prefix cache for the next call.
        warmup: without effect: it would take what it saves.
        tokenizer: for text and chats.
        generation_kwargs: any `GenerationConfig` option, `seed`, `attention_mask`, `chat_template_kwargs`,
            `logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn`, `logprobs`, `prompt_logprobs`,
            `logprobs_mode`, `include_stop_str_in_output`.
    """

    def call() -> dict[str, GenerationOutput]:
        batch = _batch(
            settings, self, inputs, generation_config, continuous_batching_config, tokenizer, generation_kwargs
        )
        batch.persistent = persistent_manager
        return calls.generate_batch(batch, record_timestamps=record_timestamps, progress_bar=progress_bar)

    options = (generation_config, continuous_batching_config, generation_kwargs)
    return following.shared(self, "generate_batch", call, inputs=inputs, options=options)


def stream_batch(
    settings: Settings,
    self: Any,
    inputs: Any = None,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generation_kwargs: Any,
) -> Generator[Delta]:
    """Tokens and text of many prompts as they come; arguments as for `generate_batch`."""
    given = (settings, self, inputs, generation_config, continuous_batching_config, tokenizer, generation_kwargs)
    options = (generation_config, continuous_batching_config, generation_kwargs)
    return following.shared_stream(self, "stream_batch", lambda: calls.stream_batch(_batch(*given)), inputs, options)


def iterate_batch(
    settings: Settings,
    self: Any,
    inputs: Any = None,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generation_kwargs: Any,
) -> Generator[GenerationOutput]:
    """Whole results as each finishes (see their `index`); arguments as for `generate_batch`. Inputs may be endless."""
    given = (settings, self, inputs, generation_config, continuous_batching_config, tokenizer, generation_kwargs)
    options = (generation_config, continuous_batching_config, generation_kwargs)
    return following.shared_stream(self, "iterate_batch", lambda: calls.iterate_batch(_batch(*given)), inputs, options)


def init_continuous_batching(
    settings: Settings,
    self: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> ContinuousBatchingManager | following.FollowingManager:
    """A manager, not started; the kept one if there is one."""

    def call() -> ContinuousBatchingManager:
        config = settings.config_of(continuous_batching_config, generation_config)
        return session.get_manager(self, config, settings.tokenizer_of(self, tokenizer), generation_config)

    options = (generation_config, continuous_batching_config)
    return following.shared_manager(self, "init_continuous_batching", call, options)


def continuous_batching_context_manager(
    settings: Settings,
    self: Any,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: Any = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: Any = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> AbstractContextManager[ContinuousBatchingManager | following.FollowingManager]:
    """A running manager for a `with` block; at its end all requests are finished.

    `warmup`: on a GPU, what the first steps do for the first time is done before the block begins.
    """

    def call() -> AbstractContextManager[ContinuousBatchingManager]:
        return session.open_manager(
            self,
            settings.config_of(continuous_batching_config, generation_config),
            settings.tokenizer_of(self, tokenizer),
            persistent_manager,
            generation_config=generation_config,
            block=block,
            timeout=timeout,
            warmup=warmup,
        )

    options = (generation_config, continuous_batching_config, persistent_manager)
    return following.shared_session(self, "continuous_batching_context_manager", call, options)


def destroy_cached_continuous_batching_manager(settings: Settings, self: Any) -> None:
    """Destroys the kept manager and frees its cache."""
    following.shared(self, "destroy_cached_continuous_batching_manager", lambda: kept.drop_kept_manager(self))


def decode(
    settings: Settings, self: Any, reason: str | None, original: Callable[[], Any], input_ids: Any, /, **given: Any
) -> Any:
    """A decoding loop of `generate`, as it calls it. `original` is transformers' own, on the same arguments; `reason`
    says why this one is left to it."""
    if reason is not None:
        return routing.leave(reason, original)
    names = {"logits_processor": "processors", "stopping_criteria": "criteria", "generation_config": "config"}
    names |= {"synced_gpus": "synced_gpus", "streamer": "streamer"}
    own = {ours: given.pop(theirs) for theirs, ours in names.items() if theirs in given}
    return routing.generate(Call(self, input_ids, inputs=given, options=settings.config, **own), original)


METHODS = {
    "generate_batch": generate_batch,
    "stream_batch": stream_batch,
    "iterate_batch": iterate_batch,
    "init_continuous_batching": init_continuous_batching,
    "continuous_batching_context_manager": continuous_batching_context_manager,
    "destroy_cached_continuous_batching_manager": destroy_cached_continuous_batching_manager,
}
NEW = ("stream_batch", "iterate_batch")  # transformers has nothing of that name


def _batch(
    settings: Settings,
    model: Any,
    inputs: Any,
    generation_config: Any,
    config: Any,
    tokenizer: Any,
    options: dict[str, Any],
) -> calls.Batch:
    """The arguments of a call, sorted; `generate_batch(**tokenizer(...))` works too."""
    check_supported(model)
    options.pop("token_type_ids", None)
    if not media_inputs({"mm_token_type_ids": options.get("mm_token_type_ids")}):
        options.pop("mm_token_type_ids", None)
    if inputs is None:
        inputs = options.pop("input_ids", None)
    if inputs is None:
        raise TypeError("inputs are missing: pass prompts, or input_ids as a tokenizer returns them.")
    return calls.Batch(
        model=model,
        inputs=inputs,
        generation_config=generation_config,
        config=settings.config_of(config, generation_config),
        tokenizer=settings.tokenizer_of(model, tokenizer),
        attention_mask=options.pop("attention_mask", None),
        chat_template_kwargs=options.pop("chat_template_kwargs", None),
        options=options,
    )


_folder_tokenizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _folder_tokenizer(model: Any) -> Any:
    """Looked for once a model; None if its folder has none: ids in, ids out."""
    if model not in _folder_tokenizers:
        from transformers import AutoTokenizer

        folder = getattr(model.config, "_name_or_path", "")
        try:
            _folder_tokenizers[model] = AutoTokenizer.from_pretrained(folder) if folder else None
        except Exception as error:  # whatever its tokenizer lacks; ids can be generated from all the same
            logger.info("%s has no usable tokenizer: %s", folder, error)
            _folder_tokenizers[model] = None
    return _folder_tokenizers[model]
