"""patch, unpatch, accelerate, restore: how transformers' models get their new calls, and lose them again.

This is the only file that touches transformers' classes. Methods are put on the class that all models inherit them
from, and look each time whether hf_cb is on for this model; nothing is ever stored on a model, so that copying, saving
and pickling it work as before.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_cb.attention import interception
from hf_cb.config import EngineConfig
from hf_cb.errors import IncompatibleTransformersError, OptionError, UnsupportedModelError
from hf_cb.manager import explain as explaining
from hf_cb.manager import kept
from hf_cb.manager.generating.run import forget_refusal
from hf_cb.manager.ranks import following
from hf_cb.methods import METHODS, NEW, Settings, decode
from hf_cb.models.fused import stack
from hf_cb.models.support import check_supported
from hf_cb.modules.wanted import want
from hf_cb.options import recipe as generation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# The decoding loops of `generate`, which has checked and built everything by then, with the reason not to route one
_LOOPS = {"_sample": None, "_beam_search": "beam search", "_assisted_decoding": "assisted decoding"}
_lock = threading.Lock()
_dead: list[int] = []  # accelerated models that were collected, and are still counted as users
_patched: Settings | None = None
_accelerated: weakref.WeakKeyDictionary[Any, Settings] = weakref.WeakKeyDictionary()
_finalizers: dict[int, weakref.finalize] = {}
_originals: dict[str, Any] = {}
_users = 0


def patch(**options: Any) -> None:
    """Every transformers model batches through hf_cb from now on; calling it again changes the options.

    Args:
        options: fields of `EngineConfig`. `modules` is refused: it changes models, so it is for `accelerate`.

    Raises:
        OptionError: an unknown option. IncompatibleTransformersError: transformers lacks something; nothing is changed.
    """
    global _patched
    if "modules" in options:
        raise OptionError(f"modules={options['modules']!r} changes one model: give it to hf_cb.accelerate(model).")
    settings = Settings(EngineConfig.of(None, **options))
    with _locked():
        if _patched is None:
            _acquire()
        _patched = settings


def unpatch() -> None:
    """Undoes `patch`; models that were accelerated one by one stay so. Harmless if nothing is patched."""
    global _patched
    for model in kept.models_with_kept_managers():
        if model not in _accelerated:
            kept.drop_kept_manager(model)
    with _locked():
        if _patched is not None:
            _patched = None
            _release()


def accelerate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any
) -> PreTrainedModel:
    """This model batches through hf_cb from now on, and so does its `generate`, wherever the answers are the same
    (docs/generate.md); returns it. Calling it again changes tokenizer and options. Of a wrapper that hands its calls on
    (PEFT's, `torch.compile`'s), the model inside is accelerated.

    Args:
        tokenizer: for prompts that are text or chats, and for text in results; the model's own folder has it if None.
        options: fields of `EngineConfig`.

    Raises:
        UnsupportedModelError, OptionError, IncompatibleTransformersError: nothing is changed then.
    """
    settings = Settings(EngineConfig.of(None, **options), tokenizer)
    check_supported(model)
    inner = _whose_calls(model)
    if inner is not model and getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} puts learned vectors in front of each prompt, which are no token ids: leave it to "
            f"generate, or use adapters that change layers, as LoRA does."
        )
    with _locked():
        if inner not in _accelerated:
            _acquire()
            _finalizers[id(inner)] = weakref.finalize(inner, _bury, id(inner))
            _finalizers[id(inner)].atexit = False
        _accelerated[inner] = settings
        forget_refusal(inner)
        want(inner, settings.config.modules or "fused")
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes `accelerate`, and destroys a manager that is kept with the model. Harmless on any other model."""
    inner = _whose_calls(model)
    if inner in _accelerated:
        kept.drop_kept_manager(inner)  # outside the lock: it waits for a thread
    with _locked():
        if _accelerated.pop(inner, None) is not None:
            _finalizers[id(inner)].detach()
            _dead.append(id(inner))
    want(inner, None)
    stack.forget(inner)
    return model


def explain(model: PreTrainedModel) -> explaining.Explanation:
    """Which path, backend and sizes a model takes, and why; print it. Works on any model, patched or not."""
    check_supported(model)
    model = _whose_calls(model)
    with interception.installed():
        settings = _settings_of(model)
        options = settings.config if settings else EngineConfig()
        return following.shared(model, "explain", lambda: explaining.explain(model, options))


@contextmanager
def _locked() -> Iterator[None]:
    with _lock:
        try:
            yield
        finally:
            _forget_the_dead()


def _bury(key: int) -> None:
    """Called by the garbage collector, anywhere: also in a thread that holds the lock, which then does the rest."""
    _dead.append(key)
    if _lock.acquire(blocking=False):
        try:
            _forget_the_dead()
        finally:
            _lock.release()


def _forget_the_dead() -> None:
    while _dead:
        del _finalizers[_dead.pop()]
        _release()
    _route_generate(bool(_finalizers))


def _whose_calls(model: Any) -> Any:
    """The model that gets what is called on `model`: itself, or the one inside a wrapper."""
    return getattr(getattr(model, "generate_batch", None), "__self__", model)


def _settings_of(model: Any) -> Settings | None:
    return _accelerated.get(model) or _patched


# --------------------------------------------------------------------------------------------------------- installation


def _acquire() -> None:
    """Puts the calls on transformers' class; counted."""
    global _users
    if _users == 0:
        _check_transformers()
        interception.install(__name__)
        _install()
    _users += 1


def _release() -> None:
    global _users
    _users -= 1
    if _users == 0:
        _uninstall()
        interception.uninstall(__name__)


def _check_transformers() -> None:
    from transformers import GenerationMixin

    gone = interception.missing() + generation.missing(GenerationMixin)
    mixin = _mixin()
    gone += [f"{mixin.__name__}.{name}" for name in METHODS if name not in NEW and not hasattr(mixin, name)]
    if gone:
        import transformers

        raise IncompatibleTransformersError(
            f"transformers {transformers.__version__} lacks {', '.join(gone)}, which hf_cb builds on: install a "
            f"version that hf_cb supports (>=5.17,<6)."
        )


def _mixin() -> Any:
    from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

    return ContinuousMixin


def _install() -> None:
    mixin = _mixin()
    for name, method in METHODS.items():
        original = vars(mixin).get(name)
        if original is not None:
            _originals[name] = original
        setattr(mixin, name, _dispatch(name, method, original))


def _uninstall() -> None:
    mixin = _mixin()
    for name in METHODS:
        if name in _originals:
            setattr(mixin, name, _originals.pop(name))
        else:
            delattr(mixin, name)


def _route_generate(wanted: bool) -> None:
    """Puts our decoding loop in the place of `generate`'s own while models are accelerated, or takes it out."""
    from transformers import GenerationMixin

    for name, reason in _LOOPS.items():
        if wanted and name not in _originals:
            _originals[name] = vars(GenerationMixin)[name]
            setattr(GenerationMixin, name, _loop(_originals[name], reason))
        elif not wanted and name in _originals:
            setattr(GenerationMixin, name, _originals.pop(name))


def _loop(original: Any, reason: str | None) -> Any:
    """A decoding loop, on accelerated models by the engine, or with the reason why it is not."""

    @functools.wraps(original)
    def loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = _accelerated.get(self)
        if settings is None:
            return original(self, *args, **kwargs)
        return decode(settings, self, reason, lambda: original(self, *args, **kwargs), *args, **kwargs)

    return loop


def _dispatch(name: str, method: Any, original: Any) -> Any:
    """`method` on models that hf_cb is on for, else what was there before."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = _settings_of(self)
        if settings is not None:
            return method(settings, self, *args, **kwargs)
        if original is None:
            raise AttributeError(f"{type(self).__name__}.{name} needs hf_cb.patch() or hf_cb.accelerate(model).")
        return original(self, *args, **kwargs)

    parameters = list(inspect.signature(method).parameters.values())[1:]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__qualname__ = f"ContinuousMixin.{name}"
    return call
