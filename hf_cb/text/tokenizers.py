"""Tokenizers that several threads share."""

from __future__ import annotations

import threading
import weakref
from typing import Any

_locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def tokenizer_lock(tokenizer: Any) -> threading.Lock:
    """The one lock of this tokenizer object.

    Fast tokenizers keep padding and truncation as state: without a lock, threads that share one truncate each
    other's prompts without a word, or raise "Already borrowed", by the version of `tokenizers`.
    """
    with _locks_guard:
        return _locks.setdefault(tokenizer, threading.Lock())
