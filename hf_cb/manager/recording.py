"""Writing down what is submitted to a manager, so that the same arrivals can be replayed against other settings.

What a prompt said is not kept unless that is asked for: by default a file has lengths and numbers for blocks, which
tell that two prompts begin alike, and not with what.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from hf_cb.arrivals import HASH_BLOCK, Arrival, Trace, header, in_order
from hf_cb.core import Request, Update
from hf_cb.errors import OptionError, QueueFullError

logger = logging.getLogger("hf_cb")
Prompts = Literal["hashes", "lengths", "ids"]
PROMPTS = ("hashes", "lengths", "ids")


class Recorder:
    """A recording that goes on until `stop`, or until the end of a `with`. A request is written when it has ended.

    Args:
        file: where to: a path, an open text file, or None to keep it for `trace`.
        prompts: what is kept of prompts: "hashes" of blocks, "lengths" alone, or all their "ids".

    Raises:
        OptionError: `prompts` is none of these. OSError: the file cannot be written.
    """

    def __init__(self, file: str | os.PathLike[str] | TextIO | None, prompts: Prompts) -> None:
        if prompts not in PROMPTS:
            raise OptionError(f"prompts={prompts!r} must be one of {', '.join(PROMPTS)}.")
        self.prompts = prompts
        self._began = time.perf_counter()
        self._lock = threading.RLock()  # a garbage collection inside may end a request
        self._live: dict[Request, Arrival] = {}
        self._kept: list[Arrival] = []
        self._salt = secrets.token_bytes(16)
        self._numbers: dict[bytes, int] = {}
        self._users: dict[str, int] = {}
        self.stopped = False
        self._file: TextIO | None
        self._ours = isinstance(file, (str, os.PathLike))
        self._file = open(file, "w", encoding="utf-8") if isinstance(file, (str, os.PathLike)) else file  # noqa: SIM115
        if self._file is not None:
            self._file.write(header())

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def trace(self) -> Trace:
        """What has ended so far; only without a file.

        Raises:
            OptionError: it goes to a file, or nothing has ended.
        """
        if self._file is not None:
            raise OptionError("This recording goes to a file: read it from there.")
        with self._lock:
            return in_order("recorded", self._kept, HASH_BLOCK)

    def stop(self) -> None:
        """Ends the recording. Requests that go on are written with the tokens that they have made so far."""
        with self._lock:
            self._end(list(self._live))
            self.stopped = True
            if self._file is not None and not self._file.closed:
                self._file.close() if self._ours else self._file.flush()

    def arrived(self, requests: Sequence[Request]) -> None:
        """By whoever submits them, before they can end."""
        with self._lock:
            if not self.stopped:
                self._live.update((request, self._arrival(request)) for request in requests)

    def rejected(self, requests: Sequence[Request]) -> None:
        """They came and found the queue full: arrivals too, with the length that they were given, if they were."""
        with self._lock:
            for request in requests:
                arrival = self._live.pop(request, None)
                if arrival is not None and request.params.length_is_given:
                    self._write(arrival, request.params.max_new_tokens)

    def forget(self, requests: Sequence[Request]) -> None:
        """They were refused."""
        with self._lock:
            for request in requests:
                self._live.pop(request, None)

    def ended(self, updates: Iterable[Update]) -> None:
        """By the engine's thread: a step's news."""
        finished = [update.request for update in updates if update.finished]
        if finished:
            with self._lock:
                self._end(finished)

    def _end(self, requests: Iterable[Request]) -> None:
        for request in requests:
            arrival = self._live.pop(request, None)
            if arrival is not None:
                self._write(arrival, max(1, request.num_output))

    def _write(self, arrival: Arrival, output_tokens: int) -> None:
        arrival = Arrival(
            arrival.at, arrival.prompt_tokens, output_tokens, arrival.prompt, arrival.hash_ids, arrival.options
        )
        if self._file is None:
            self._kept.append(arrival)
        elif not self.stopped:
            try:
                self._file.write(json.dumps(arrival.as_dict()) + "\n")
            except (OSError, ValueError) as error:  # a full disk, a closed file: generation goes on
                logger.warning("Recording has ended: %s", error)
                self.stopped = True
                self._live.clear()

    def _arrival(self, request: Request) -> Arrival:
        options: dict[str, Any] = {}
        if request.priority:
            options["priority"] = request.priority
        if (user := request.user) is not None:
            options["user"] = f"user{self._users.setdefault(user, len(self._users))}"
        if request.deadline is not None:
            options["deadline"] = round(request.deadline - request.created, 6)
        if request.params.do_sample:
            options["do_sample"] = True
        at = max(0.0, request.created - self._began)
        ids = list(request.prompt_ids) if self.prompts == "ids" else None
        hashes = tuple(self._hashes(request.prompt_ids)) if self.prompts == "hashes" else ()
        return Arrival(at, len(request.prompt_ids), 0, ids, hashes, options)

    def _hashes(self, prompt_ids: Sequence[int]) -> Iterator[int]:
        """A number for each block, of all that comes before its end; the same one for the same beginning."""
        before = self._salt
        for begin in range(0, len(prompt_ids), HASH_BLOCK):
            block = array("q", prompt_ids[begin : begin + HASH_BLOCK]).tobytes()
            before = hashlib.blake2b(block, key=before, digest_size=16).digest()
            yield self._numbers.setdefault(before, len(self._numbers))


class Recordable:
    """Mixed into the manager."""

    recorder: Recorder | None = None

    def record(self, file: str | os.PathLike[str] | TextIO | None = None, *, prompts: Prompts = "hashes") -> Recorder:
        """Writes down when requests come and how long they are, until `stop()` or the end of a `with`; `hf-cb replay`
        reads it.

        Args:
            file: a path, an open text file, or None to keep it in memory, for the recorder's `trace`.
            prompts: "hashes" of blocks tell which prompts begin alike, and not with what; "lengths"; or the "ids".

        Raises:
            OptionError: a recording goes on already, or `prompts` is none of these. OSError: the file cannot be
                written.
        """
        if self.recorder is not None and not self.recorder.stopped:
            raise OptionError("This manager is being recorded already: stop() that recording first.")
        self.recorder = Recorder(file, prompts)
        return self.recorder


@contextmanager
def recording(recorder: Recorder | None, requests: Sequence[Request]) -> Iterator[None]:
    """Around a submission."""
    if recorder is None:
        yield
        return
    try:
        recorder.arrived(requests)
        yield
    except QueueFullError:
        recorder.rejected(requests)
        raise
    except BaseException:
        recorder.forget(requests)
        raise
