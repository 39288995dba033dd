"""docs/sampling.md is what the code and the examples say."""

from __future__ import annotations

from importlib.metadata import version

import make_sampling
import pytest


def test_the_page_is_up_to_date() -> None:
    theirs, now = make_sampling.PAGE.read_text(), make_sampling.page()
    if theirs.count("| `") != now.count("| `"):
        pytest.skip(f"transformers {version('transformers')} has other fields than the version the page was made with")
    assert theirs == now, "run python docs/make_sampling.py"


def test_every_refused_field_has_a_reason() -> None:
    from hf_cb.options.fields import REFUSED, WHY_REFUSED

    assert set(REFUSED) == set(WHY_REFUSED)
