"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from hf_cb.errors import HfCbError, OptionError, missing


def check_folder(path: Path, option: str) -> None:
    """OptionError if nothing can be written there: better before the work than after it."""
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: there is no such folder.")
    if path.is_dir():
        raise OptionError(f"{option} {path}: this is a folder, give a file's name.")
    if not os.access(path.parent, os.W_OK):
        raise OptionError(f"{option} {path}: the folder {path.parent} cannot be written to.")


def check_picture(path: Path, option: str) -> None:
    """`check_folder`, and OptionError if matplotlib is missing or does not know the kind of file that the name ends
    with."""
    check_folder(path, option)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise OptionError(missing(option, "plot", error)) from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise OptionError(f"{option} {path}: the name must end with one of {', '.join(f'.{kind}' for kind in known)}.")


def write_figure(figure: Any, path: Path, dpi: int = 100) -> None:
    """A figure of matplotlib, by `write_file`; the suffix says in which format."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=dpi)
    write_file(path, drawn.getvalue())


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
