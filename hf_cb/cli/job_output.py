"""A job's output file: one JSON object a line, appended as each is done, so that a job goes on where it was killed."""

from __future__ import annotations

import fcntl
import json
import os
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hf_cb.errors import HfCbError, OptionError

SYNC_S = 1.0  # at most so much work is lost when the machine (not only the process) goes down
_NOWHERE = -1


class JobOutput:
    """Which lines are done, and where in the file they stand. Made by `open_output`.

    Every record has the "index" of its line and a "key": a digest of the job's settings and one of the line. With
    them a later run tells what is done, and whether it was asked for the same.
    """

    def __init__(self, path: Path, file: BinaryIO, settings: str) -> None:
        self.path, self._file, self._settings = path, file, settings
        self.failed = 0
        self.done = 0
        self._places = array("q")  # by index: where its record begins, or _NOWHERE
        self._digests = array("Q")  # by index: of its line
        self._in_order = True
        self._size = 0
        self._synced = time.monotonic()

    def __contains__(self, index: int) -> bool:
        return index < len(self._places) and self._places[index] != _NOWHERE

    @property
    def highest(self) -> int:
        """The last line that has an answer; -1 if none has."""
        return len(self._places) - 1

    def digest(self, index: int) -> str:
        """Of the line that was answered."""
        return f"{self._digests[index]:016x}"

    def add(self, index: int, digest: str, record: dict[str, Any]) -> None:
        """Appends a record; it is in the file when this returns, and on the disk within `SYNC_S` seconds of work."""
        whole = {"index": index} | record | {"key": f"{self._settings}-{digest}"}
        # half of a surrogate pair, perhaps in an id, stays the escape that it came as: UTF-8 cannot hold it
        data = json.dumps(whole, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        with self._writing():
            self._file.write(data)
            self._file.flush()
        if time.monotonic() - self._synced > SYNC_S:
            self.sync()
        self._note(index, digest, self._size, bool(record.get("error")))
        self._size += len(data)

    def sync(self) -> None:
        with self._writing():
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # a full disk, say
            raise HfCbError(
                f"{self.path} cannot be written: {error}. What is in it is good: the same command goes on from there."
            ) from error

    def finish(self) -> None:
        """Puts the records in the order of the input; in one stroke, so that a kill leaves either order."""
        self.sync()
        if not self._in_order:
            self._rewrite(place for place in self._places if place != _NOWHERE)

    # --------------------------------------------------------------------------------------------------- reading back

    def _note(self, index: int, digest: str, place: int, failed: bool) -> None:
        if index >= len(self._places):
            more = index + 1 - len(self._places)
            self._places.extend([_NOWHERE] * more)
            self._digests.extend([0] * more)
        elif index != len(self._places) - 1 or self._places[index] != _NOWHERE:
            self._in_order = False
        if self._places[index] == _NOWHERE:
            self.done += 1
            self.failed += failed
        self._places[index], self._digests[index] = place, int(digest, 16)

    def scan(self) -> None:
        """Reads what is there. A last line that is not whole, as a kill leaves it, is cut off.

        Raises:
            OptionError: these are not records of this job.
        """
        self._file.seek(0)
        for number, raw in enumerate(self._file, start=1):
            if not raw.endswith(b"\n"):
                break
            index, settings, digest, failed = self._parse(raw, number)
            if settings != self._settings:
                raise OptionError(
                    f"{self.path} was written with other options (model, dtype, sampling, seed, ...): give the same "
                    f"ones, another --output, or --restart to begin anew."
                )
            self._note(index, digest, self._size, failed)
            self._size += len(raw)
        self._file.truncate(self._size)
        self._file.seek(self._size)

    def _parse(self, raw: bytes, number: int) -> tuple[int, str, str, bool]:
        try:
            record = json.loads(raw)
            settings, _, digest = record["key"].partition("-")
            int(digest, 16)
            return int(record["index"]), settings, digest, bool(record["error"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise OptionError(
                f"{self.path} is there, and its line {number} is not one that this command writes: give another "
                f"--output, or --restart to overwrite it."
            ) from None

    def forget_failed(self) -> None:
        """Takes the failed ones out, so that they are tried again."""
        if not self.failed:
            return
        self._file.seek(0)
        good, place = [], 0
        for number, raw in enumerate(self._file, start=1):
            if not self._parse(raw, number)[3]:
                good.append(place)
            place += len(raw)
        self._rewrite(good)
        self._places, self._digests = array("q"), array("Q")
        self.failed = self.done = self._size = 0
        self._in_order = True
        self.scan()

    def _rewrite(self, places: Iterable[int]) -> None:
        """The records at these places, in this order, become the file."""
        beside = self.path.with_name(self.path.name + ".new")
        with self._writing(), beside.open("w+b") as new:
            for place in places:
                self._file.seek(place)
                new.write(self._file.readline())
            new.flush()
            os.fsync(new.fileno())
        with self._writing():
            os.replace(beside, self.path)
            old, self._file = self._file, self.path.open("r+b")
        _lock(self._file, self.path)
        old.close()

    def close(self) -> None:
        with suppress(OSError):  # of a record that could not be written, which has been told
            self._file.close()


@contextmanager
def open_output(path: Path, settings: str, restart: bool = False) -> Iterator[JobOutput]:
    """The output at `path`, as far as it is there, read and repaired; nobody else may have it open.

    Raises:
        OptionError: it cannot be written, is in use, or is another job's.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")  # never emptied before it is locked
    except OSError as error:
        raise OptionError(f"--output {path} cannot be written: {error.strerror}.") from None
    output = JobOutput(path, file, settings)
    try:
        _lock(file, path)
        if restart:
            file.truncate(0)
        output.scan()
        yield output
    finally:
        output.close()


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise OptionError(f"--output {path} is being written by another process.") from None
