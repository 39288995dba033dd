"""The house rules that a parser can check: the floors, optional packages, file length, docstrings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# From the ground up. A room imports from the floors below it and from itself.
FLOORS = (
    {
        "kernels",
        "arrivals",
        "core",
        "steps",
        "config",
        "sizes",
        "errors",
        "html",
        "penalties",
        "policies",
        "seeds",
        "values",
        "warpers",
        "words",
    },
    {"attention", "modules", "text", "metrics"},
    {"models"},
    {"engine", "options"},
    {"manager"},
    {"methods"},
    {"patching", "demo"},
    {"serving", "bench", "chat"},
    {"cli"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
NEIGHBOURS = FLOORS[0] - {"kernels"}  # the rooms of one floor that may import each other
OPTIONAL = {"triton", "flash_attn", "gradio", "fastapi", "gguf", "sentencepiece", "openai", "matplotlib"}
OPTIONAL |= {"prometheus_client"}
# rooms made of an optional package: they may import it, and importing them is importing it
MADE_OF = {"hf_cb.kernels.triton": "triton", "hf_cb.chat.app": "gradio"}
MAX_LINES = 300
SOURCE_SUFFIXES = {".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """The name under which a file is installed: kernels/ becomes hf_cb.kernels.

    A package keeps its ``__init__``, so that the name's parent is always the folder.
    """
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "kernels":
        parts.insert(0, "hf_cb")
    return ".".join(parts)


def imports(source: str, module: str, module_level_only: bool = False) -> Iterator[tuple[int, str]]:
    """The line and full name of everything that a source imports, also inside functions and relatively."""

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    folder = module.split(".")[: -child.level]
                    base = ".".join([*folder, base] if base else folder)
                yield from ((child.lineno, f"{base}.{alias.name}") for alias in child.names)
            elif module_level_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            elif module_level_only and isinstance(child, ast.If) and is_type_checking(child.test):
                yield from (found for branch in child.orelse for found in visit(branch))
            else:
                yield from visit(child)

    return visit(ast.parse(source))


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def room_of(name: str) -> str | None:
    """The room that a full name lies in; "" for the package itself, None for other packages."""
    parts = name.split(".")
    if parts[0] != "hf_cb":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR_OF else ""


def floor_violations(source: str, module: str) -> list[str]:
    """Each import of a module that its floor forbids, in words."""
    parts = module.split(".")
    if parts == ["hf_cb", "__init__"]:
        return []
    if parts[1] not in FLOOR_OF:
        return [f"{module}: the room {parts[1]!r} has no floor"]
    here = parts[1]
    found = []
    for line, name in imports(source, module):
        there = room_of(name)
        if there is None or there == here:
            continue
        where = f"{module}:{line}: {here} imports {name}"
        if there == "":
            found.append(f"{where}, of the package itself, which is above every floor")
        elif FLOOR_OF[there] > FLOOR_OF[here]:
            found.append(f"{where}, which is above it")
        elif FLOOR_OF[there] == FLOOR_OF[here] and not {here, there} <= NEIGHBOURS:
            found.append(f"{where}, which is on the same floor")
    return found


def optional_violations(source: str, module: str) -> list[str]:
    """Each import of an optional package that runs when the module is imported."""
    here = {made_of for room, made_of in MADE_OF.items() if _lies_in(module, room)}
    found = []
    for line, name in imports(source, module, module_level_only=True):
        taken = {name.split(".")[0]} | {made_of for room, made_of in MADE_OF.items() if _lies_in(name, room)}
        if (taken & OPTIONAL) - here:
            found.append(f"{module}:{line}: imports {name} at module level")
    return found


def _lies_in(name: str, room: str) -> bool:
    return f"{name}.".startswith(f"{room}.")


def test_the_floors_are_those_that_contributors_read() -> None:
    rows = re.findall(r"^\| (\d) \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    told = {int(floor): set(re.findall(r"`(\w+)`", rooms)) for floor, rooms in rows}
    assert told == dict(enumerate(FLOORS))


def test_imports_never_go_up():
    files = python_files("hf_cb", "kernels")
    assert files
    found = [bad for path in files for bad in floor_violations(path.read_text(), module_name(path))]
    assert not found, "\n".join(found)


def test_optional_packages_are_imported_where_they_are_used():
    files = python_files("hf_cb", "kernels")
    found = [bad for path in files for bad in optional_violations(path.read_text(), module_name(path))]
    assert not found, "\n".join(found)


def test_kernels_does_not_shadow_the_package_of_that_name():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "Hugging Face's package `kernels` has that name"


def test_files_stay_short():
    files = (path for folder in ("hf_cb", "kernels", "tests") for path in sorted((ROOT / folder).rglob("*")))
    lengths = {path: len(path.read_text().splitlines()) for path in files if path.suffix in SOURCE_SUFFIXES}
    long = [f"{path.relative_to(ROOT)}: {n} lines" for path, n in lengths.items() if n > MAX_LINES]
    assert not long, f"over {MAX_LINES} lines, so probably two rooms:\n" + "\n".join(long)


def test_every_module_says_what_it_is():
    bare = [path for path in python_files("hf_cb") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not bare, f"without a module docstring: {[str(path.relative_to(ROOT)) for path in bare]}"


def test_the_checker_sees_every_way_up():
    ways = (
        "import hf_cb.manager",
        "from hf_cb import manager",
        "from hf_cb.manager import Manager",
        "from .. import manager",
        "from ..manager.handle import Handle",
        "def f():\n    from hf_cb.manager import Manager",
        "if TYPE_CHECKING:\n    from hf_cb.manager import Manager",
        "try:\n    import hf_cb.manager as m\nexcept ImportError:\n    m = None",
    )
    for source in ways:
        for module in ("hf_cb.engine.engine", "hf_cb.engine.__init__"):
            (found,) = floor_violations(source, module)
            assert "engine imports hf_cb.manager" in found
            assert found.endswith("above it")


def test_the_checker_knows_the_house():
    def verdicts(source: str, module: str) -> list[str]:
        return [found.rsplit(", ", 1)[-1] for found in floor_violations(source, module)]

    same, roof = ["which is on the same floor"], ["which is above every floor"]
    assert verdicts("import torch\nfrom . import x\nfrom ..models import paged", "hf_cb.engine.engine") == []
    assert verdicts("from .errors import Refused", "hf_cb.config") == []
    assert verdicts("from hf_cb.kernels.reference import x", "hf_cb.attention.reference") == []
    assert verdicts("from .paged import PagedRunner", "hf_cb.models.__init__") == []
    assert verdicts("from hf_cb.text import prompts", "hf_cb.attention.reference") == same
    assert verdicts("from ... import core", "hf_cb.kernels.reference.paged_attention") == same
    assert verdicts("import hf_cb", "hf_cb.cli.serve") == roof
    assert verdicts("from hf_cb import accelerate", "hf_cb.bench.run") == roof
    assert verdicts("from hf_cb.patching import accelerate", "hf_cb.bench.run") == []
    assert verdicts("from hf_cb import anything", "hf_cb.__init__") == []
    assert floor_violations("", "hf_cb.attic.junk") == ["hf_cb.attic.junk: the room 'attic' has no floor"]


def test_the_checker_sees_optional_packages():
    at_import = (
        "import triton",
        "from fastapi import FastAPI",
        "try:\n    import gguf\nexcept ImportError: ...",
        "class A:\n    import openai",
        "from hf_cb.kernels.triton import paged_attention",
        "from hf_cb.kernels import triton",
    )
    later = (
        "def f():\n    import triton",
        "if TYPE_CHECKING:\n    import triton",
        "from . import triton",
    )
    for source in at_import:
        assert len(optional_violations(source, "hf_cb.attention.triton")) == 1
    for source in later:
        assert optional_violations(source, "hf_cb.attention.backend") == []
    assert optional_violations("import triton", "hf_cb.kernels.triton.paged_attention") == []
