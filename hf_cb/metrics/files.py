"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hf_cb.errors import HfCbError, OptionError


def check_folder(path: Path, option: str) -> None:
    """OptionError if nothing can be written there: better before the work than after it."""
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: there is no folder {path.parent}.")
    if path.is_dir():
        raise OptionError(f"{option} {path}: this is a folder, give a file's name.")
    if not os.access(path.parent, os.W_OK):
        raise OptionError(f"{option} {path}: the folder {path.parent} cannot be written to.")


def write_file(path: Path, content: bytes) -> None:
    """Replaces the file, or leaves it as it was and raises HfCbError (a full disk, a folder that is not ours)."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise HfCbError(f"{path} cannot be written ({len(content):,} bytes): {error.strerror or error}") from error
