"""Every error that hf_cb raises by its own name, in one place."""

from __future__ import annotations


class HfCbError(Exception):
    """Base of all errors that are hf_cb's own."""


class OptionError(HfCbError, ValueError):
    """An option that is unknown, of the wrong type or value, or not supported; the message names it."""


class PromptError(HfCbError, ValueError):
    """A prompt that cannot be generated from: empty, unknown token ids, too long."""


class UnsupportedModelError(HfCbError, NotImplementedError):
    """A model that hf_cb cannot drive; the message names the class and the reason."""


class ModelChangedError(HfCbError, RuntimeError):
    """The model is not what it was when its manager was made (moved, cast, patched): no request can go on."""


class RankError(ModelChangedError):
    """A process of a tensor-parallel model has failed, is gone or is out of step: nothing goes on with that model."""


class IncompatibleTransformersError(HfCbError, ImportError):
    """The installed transformers lacks something that hf_cb builds on; the message names what."""


class ManagerStoppedError(HfCbError, RuntimeError):
    """The manager is dead, stopped or stopping; `__cause__` is the exception that killed it, if one did."""


class QueueFullError(HfCbError, RuntimeError):
    """More requests wait than `max_queue_size` allows."""


class RequestFailedError(HfCbError, RuntimeError):
    """A request ended with an error while others went on; the message is that request's own."""


class RequestCancelledError(HfCbError, RuntimeError):
    """The manager dropped the request before it was finished (hard stop)."""


def describe(error: BaseException) -> str:
    """An exception in one line, whatever its own words do."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def install(extra: str) -> str:
    """What brings the packages of one of hf-cb's extras, wherever hf-cb itself was installed from."""
    return f'pip install "hf-cb[{extra}]"'  # these quotes are right in every shell


def missing(what: str, extra: str, error: ImportError) -> str:
    """That something takes packages which cannot be imported here: which of them, and how to get them."""
    return f"{what} takes more packages than are here ({error}): {install(extra)}"
