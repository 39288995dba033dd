"""docs/options.md is what the code says, and the lists that it is made of are about fields that exist."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers import GenerationConfig

from hf_cb.options.fields import HONOURED, NEUTRAL, REFUSED

SCRIPT = Path(__file__).parents[2] / "docs" / "make_options.py"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_options", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    theirs, theirs_now = (
        text.split("EngineConfig(")[0].count("| `") for text in (script.PAGE.read_text(), script.page())
    )
    if theirs != theirs_now:
        pytest.skip(f"transformers {version('transformers')} has other fields than the version the page was made with")
    assert script.PAGE.read_text() == script.page(), "run python docs/make_options.py"


def test_every_field_has_one_fate() -> None:
    assert not (HONOURED & NEUTRAL or HONOURED & set(REFUSED) or NEUTRAL & set(REFUSED))
    fields = {n for n in vars(GenerationConfig()) if not n.startswith("_")}
    unknown = fields - HONOURED - NEUTRAL - set(REFUSED)
    assert not unknown, f"{unknown} would be refused without anybody having looked at them"
