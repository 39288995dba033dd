"""A tensor-parallel model (`tp_plan="auto"`) in two processes: rank 0 drives, and every rank has the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_scenarios
import torch
import transformers
from rank_scenarios import PROMPTS
from ranks import NEEDS_RANKS, run_ranks, values
from tiny_models import SHAPE, generate_alone, greedy, make_model

import hf_cb
from hf_cb.models.twin import spread_weights

pytestmark = NEEDS_RANKS


@pytest.fixture(scope="module")
def folders(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """By the number of ranks that can share the model's heads."""
    path = tmp_path_factory.mktemp("llama4")
    make_model("Llama", num_key_value_heads=4).save_pretrained(path)
    return {2: folder, 4: str(path)}


@pytest.fixture(scope="module")
def seen(folder: str) -> list[dict[str, Any]]:
    return values(run_ranks(rank_scenarios.answers, folder))


def test_tokens_are_those_of_the_whole_model(seen, want) -> None:
    assert seen[0]["tiny"] == seen[0]["chunked"] == seen[0]["overlapping"] == want
    assert seen[0]["preemptions"] > 0, "the cache was meant to be too small"
    assert seen[0]["reasons"] == ["length"] * len(PROMPTS)


def test_every_rank_has_the_same_results(seen) -> None:
    driver, follower = seen
    assert follower == driver


def test_each_rank_pages_its_own_heads_with_the_models_own_modules(seen) -> None:
    explained = seen[0]["explained"]
    assert "paged (its logits are those of generate)" in explained
    assert "4 with full attention: 2 heads, 1 KV heads of 16" in explained  # of 4 and 2
    assert "modules: the model's own (its weights are spread over several processes)" in explained


def test_log_probabilities_are_those_of_the_whole_model(seen, want) -> None:
    model = make_model("Llama")
    for prompt, tokens, told, logits in zip(PROMPTS, want, seen[0]["prompt_logprobs"], seen[0]["logits"], strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([prompt + tokens])).logits[0]
        own = [found[i] for found, i in zip(told[1:], prompt[1:], strict=True)]
        expected = rows.log_softmax(-1)[: len(own)].gather(1, torch.tensor(prompt[1:], dtype=torch.long)[:, None])[:, 0]
        assert own == pytest.approx(expected.tolist(), abs=1e-4)
        torch.testing.assert_close(torch.tensor(logits), rows[len(prompt) - 1 : -1], atol=1e-4, rtol=0)


def test_the_driver_samples_as_ever(seen) -> None:
    model = hf_cb.accelerate(make_model("Llama"), modules="off")
    sampled = greedy(do_sample=True, temperature=1.5, num_return_sequences=2)
    whole = model.generate_batch(PROMPTS[:3], sampled, seed=7)
    assert seen[0]["sampled"] == rank_scenarios.tokens(whole)
    hf_cb.restore(model)


def test_prompts_may_be_left_to_the_driver(seen, want) -> None:
    assert seen[1]["left to rank 0"] == want[:2]


def test_streams_come_on_every_rank(seen, want) -> None:
    for of_rank in seen:
        found: list[list[int]] = [[], [], []]
        for delta in of_rank["stream"]:
            found[delta.index] += delta.token_ids
        assert found == want[:3]
        assert of_rank["iterated"] == dict(enumerate(want))


def test_every_rank_leaves_the_model_as_it_was(seen, want) -> None:
    for of_rank in seen:
        assert of_rank["training"], "it was training before"
        assert of_rank["alone"] == want[0]
        assert of_rank["interceptions"] == 0


def test_errors_of_a_call_or_a_request_reach_every_rank_and_end_nothing_else(folder, want) -> None:
    driver, follower = values(run_ranks(rank_scenarios.errors, folder))
    assert "no_such_option" in driver["option"]
    assert follower == driver
    assert driver["empty prompt"] == [
        (want[0], "length", "NoneType"),
        ([], "error", "PromptError"),
        (want[1], "length", "NoneType"),
    ]
    assert driver["bad forward"] == [
        (want[0], "length", "None"),
        ([], "error", "a token of ill repute"),
        (want[1], "length", "None"),
    ]
    assert driver["after"] == want


def test_managers(folder, want) -> None:
    model = make_model("Llama")
    long = [generate_alone(model, prompt, greedy(30)) for prompt in PROMPTS]
    driver, follower = values(run_ranks(rank_scenarios.manage, folder))
    assert driver["streamed"] == long[0]
    assert driver["results"] == long[3:]
    assert driver["cancelled"] == "cancelled"
    assert "rank 1" in follower["refused"] and "manager.is_tp_driver" in follower["refused"]
    assert follower["nothing"] == [None, None, []]
    assert driver["polled"] == [want[0]] and follower["polled"] == []
    for of_rank in (driver, follower):
        assert of_rank["stopped"] and of_rank["stopped again"]
        assert of_rank["first"] == (want, 0)
        assert of_rank["second"][0] == want and of_rank["second"][1] > 0, "the prefixes are remembered"


def test_the_rank_with_the_least_memory_decides(folder) -> None:
    driver, follower = values(run_ranks(rank_scenarios.least_memory, folder))
    assert driver == follower
    assert "rank 1 has room for no more" in driver[0]


def test_models_whose_runner_looks_at_requests(tmp_path: Path) -> None:
    """Rotary embeddings by length, convolutions with a state."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    options = SHAPE | {"layer_types": ["conv", "full_attention"] * 2}
    torch.manual_seed(0)
    lfm2 = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**options)).eval().float()
    models = [make_model("Llama", max_position_embeddings=24, rope_parameters=rope), spread_weights(lfm2)]
    folders, want = [], []
    for i, model in enumerate(models):
        model.save_pretrained(tmp_path / str(i))
        folders.append(str(tmp_path / str(i)))
        want.append(([generate_alone(model, prompt, greedy()) for prompt in PROMPTS], "paged"))
    assert values(run_ranks(rank_scenarios.others, folders)) == [want, want]


@pytest.mark.parametrize(
    ("culprit", "how", "size"), [(0, "raises", 2), (1, "raises", 2), (0, "dies", 2), (1, "dies", 2), (2, "raises", 4)]
)
def test_when_one_rank_fails_alone_all_end_with_an_error(folders, culprit: int, how: str, size: int) -> None:
    outcomes = run_ranks(rank_scenarios.failing, folders[size], culprit, how, size=size)
    for rank, outcome in enumerate(outcomes):
        if rank == culprit and how == "dies":
            assert outcome.died
            continue
        assert outcome.error is None
        first, second = outcome.value["errors"]
        said = f"Rank {culprit} is gone" if how == "dies" else "the second layer is out of order"
        assert said in first and said in second
        assert max(outcome.value["seconds"]) < 15


def test_who_waits_for_a_manager_is_woken_when_its_rank_dies(folder) -> None:
    driver, follower = run_ranks(rank_scenarios.dies_while_others_wait, folder)
    assert driver.died and follower.value is True


def test_a_rank_that_does_not_come(folder) -> None:
    driver, _ = run_ranks(rank_scenarios.alone, folder)
    assert "[1] did not come" in driver.value


def test_ranks_that_are_out_of_step_are_told(folder) -> None:
    driver, follower = values(run_ranks(rank_scenarios.out_of_step, folder))
    assert driver == follower
    assert "Rank 1 calls explain" in driver and "rank 0 calls generate_batch" in driver
