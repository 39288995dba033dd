"""Writes docs/files.md: every file of the package, in its own first words. usage: python docs/make_files.py"""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("files.md")
HEAD = """# Every file in a line

Made by `docs/make_files.py` from the files' docstrings; [architecture.md](architecture.md) says how they work together.
"""


def first_words(path: Path) -> str:
    """The first sentence of its docstring, in one line."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".:").replace("|", "\\|")


def files() -> list[Path]:
    found = [path.relative_to(ROOT) for folder in ("hf_cb", "kernels") for path in (ROOT / folder).rglob("*.py")]
    return sorted((path for path in found if path.name != "__init__.py"), key=lambda path: (path.parent, path.name))


def page() -> str:
    lines = [HEAD]
    for folder, paths in groupby(files(), key=lambda path: path.parent):
        lines += [f"## {folder}/", "", "| file | what it is |", "|---|---|"]
        lines += [f"| `{path.name}` | {first_words(ROOT / path)} |" for path in paths]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
