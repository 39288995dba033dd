"""What tests of tensor-parallel models share: the model that all ranks load, and its answers when it is alone."""

from __future__ import annotations

import pytest
from rank_scenarios import PROMPTS
from tiny_models import generate_alone, greedy, make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    make_model("Llama").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def want() -> list[list[int]]:
    model = make_model("Llama")
    return [generate_alone(model, prompt, greedy()) for prompt in PROMPTS]
