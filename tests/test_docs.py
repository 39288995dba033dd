"""Every code block of the documentation runs, page by page, in the order of the page; commands are understood.

A block under the comment `<!-- not run: REASON -->` is only compiled.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_files
import pytest
import transformers

from hf_cb.cli import _parser
from hf_cb.demo import HUB_ID, demo_model_path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"(^<!-- not run: .+ -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    """Their sources; those that are not to run are compiled, and left out."""
    found = []
    for excuse, language, source in FENCE.findall(page.read_text()):
        if language in languages and not excuse:
            found.append(source)
        elif language == "python":
            compile(source, page.name, "exec")
    return found


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in blocks(page, "", "bash", "sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"\s*(\$ )?hf-cb [^|]*", line):
                    yield page.name, line.strip().removeprefix("$ ")


@pytest.fixture
def demo_model_instead_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages load models by their names on the Hub, as readers do; the demo model stands in."""
    for loader in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        original = loader.from_pretrained

        def load(name: Any, *args: Any, original: Any = original, **options: Any) -> Any:
            return original(demo_model_path() if name == HUB_ID else name, *args, **options)

        monkeypatch.setattr(loader, "from_pretrained", load)


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(
    page: Path, demo_model_instead_of_the_hub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for i, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name}, block {i}", "exec"), names)


@pytest.mark.parametrize(("page", "command"), list(commands()))
def test_commands_are_understood(page: str, command: str) -> None:
    words = shlex.split(command.split(" | ")[0], comments=True)
    words = words[1 : next((i for i, word in enumerate(words) if word in ("<", ">", "&&", ";")), None)]
    if words[:1] == ["transformers"]:
        return  # transformers' own arguments
    _parser().parse_args(words)


def test_what_is_to_be_made_can_be_made() -> None:
    known = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "demos/quickstart.ipynb"]:
        named = set(re.findall(r"(?:`|^)make ([a-z]+)\b(?=[` ]|$)", page.read_text(), re.MULTILINE))
        assert named <= known, (page.name, named - known)


def test_rooms_that_the_architecture_names_are_there() -> None:
    house = ROOT / "hf_cb"
    rooms = "|".join(path.name for path in house.iterdir() if path.is_dir())
    for room, name in re.findall(rf"\b({rooms})\.(?!(?:md|h)\b)(\w+)", (ROOT / "docs/architecture.md").read_text()):
        here = [path for path in (house / room).iterdir() if path.stem == name]
        inside = [path for path in (house / room).glob("*.py") if re.search(rf"(def|class) {name}\b", path.read_text())]
        assert here or inside, f"{room}.{name}"


def test_every_dependency_has_its_reason() -> None:
    """In the part of its extra; those of the package itself stand in the first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, *parts = re.split(r"^## ", (ROOT / "docs/dependencies.md").read_text(), flags=re.MULTILINE)
    told = {part.splitlines()[0].removeprefix("Extra ").strip("`"): part for part in parts} | {"": first}
    for extra, packages in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        reasons = [line.split(" | ")[0] for line in told[extra].splitlines() if line.startswith("| `")]
        for package in packages:
            name = re.split(r"[<>=;\s]", package)[0]
            assert any(f"`{name}`" in words for words in reasons), f"{package} of {extra or 'the package'}"


def test_make_docs_fails_on_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    arguments = re.findall(r"-m mkdocs (.+)", (ROOT / "Makefile").read_text())
    assert len(arguments) == 1
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[elsewhere](missing.md)")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\nstrict: true\nplugins: []\n")
    command = [sys.executable, "-m", "mkdocs", *shlex.split(arguments[0])]
    build = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert build.returncode != 0 and "missing.md" in build.stderr


def test_the_list_of_files_is_up_to_date() -> None:
    assert make_files.PAGE.read_text() == make_files.page(), "run python docs/make_files.py"
