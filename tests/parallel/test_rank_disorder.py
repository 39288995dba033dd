"""A tensor-parallel model when its ranks are not of one mind: nothing hangs, and no answer is silently another one."""

from __future__ import annotations

import pytest
import rank_disorder
import rank_leaving
import torch
from ranks import NEEDS_RANKS, run_ranks, values
from tiny_models import generate_alone, greedy, make_model

pytestmark = NEEDS_RANKS


def test_calls_that_the_ranks_make_differently_are_refused_on_all_of_them(
    folder: str, tmp_path_factory: pytest.TempPathFactory, want: list[list[int]]
) -> None:
    other = make_model("Llama", seed=1)
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)  # as another training would
    path = tmp_path_factory.mktemp("other")
    other.save_pretrained(path)
    driver, follower = values(run_ranks(rank_disorder.disagreements, folder, str(path)))
    for kind in ("inputs", "stream's inputs", "options", "kwargs", "config", "calls", "models"):
        assert driver[kind] == follower[kind], kind
        assert driver[kind].startswith("RankError: Rank 1 calls "), driver[kind]
    for kind in ("inputs", "options"):
        assert f"with other {kind} than rank 0" in driver[kind]
    assert "Rank 1 calls stream_batch" in driver["calls"] and "rank 0 calls iterate_batch" in driver["calls"]
    assert "on another model than rank 0" in driver["models"]
    assert "Rank 1 did not call generate_batch" in driver["alone"] and driver["alone"] == follower["alone"]
    assert "Rank 0 did not call generate_batch" in follower["alone too"]
    assert "Rank 1 has not waited with generate_batch" in driver["alone too"]
    for of_rank in (driver, follower):
        assert of_rank["alike"] == of_rank["alike again"] == want[:2]


def test_what_a_script_does_between_calls(folder: str) -> None:
    driver, follower = values(run_ranks(rank_disorder.between_calls, folder))
    for of_rank in (driver, follower):
        assert of_rank["changed"] == of_rank["changed alone"], "a rank took part that still had other weights"
        assert of_rank["training"], "it was training before"
        assert of_rank["gone"], "a rank keeps a model that is deleted everywhere"
    assert driver["random"] == follower["random"], "sampling on all ranks by plain generate would go apart"
    assert driver["own random"] != follower["own random"]
    for name in ("abandoned", "unread"):
        assert follower[name].startswith("RankError: Rank 0 has left stream_batch"), follower[name]


def test_a_call_that_rank_0_leaves_ends_elsewhere_after_the_last_step(folder: str) -> None:
    """The script may use the process group then."""
    driver, follower = values(run_ranks(rank_leaving.leaves, folder))
    assert follower["said"].startswith("RankError: Rank 0 has left stream_batch")
    assert follower["done later"] == 0
    assert driver["next"] == follower["next"]


@pytest.mark.parametrize("where", ["layer", "end"])
def test_a_rank_that_fails_alone_computes_nothing_more(folder: str, where: str) -> None:
    for of_rank in values(run_ranks(rank_disorder.fails, folder, where)):
        for error in of_rank["errors"]:
            assert "Rank 1 failed (RankError: _Untold: out of order) while the others went on" in error
        assert of_rank["seconds"] < 15


def test_a_rank_that_dies_in_a_probe_says_nothing_about_the_model(folder: str) -> None:
    driver, follower = run_ranks(rank_disorder.ends_in_a_probe, folder, "dies")
    assert follower.died
    assert driver.value["first"].startswith("RankError: Rank 1 is gone")
    assert driver.value["explained"].startswith("RankError: Rank 1 is gone")


def test_the_rank_with_the_store_dies_before_they_have_met(folder: str) -> None:
    driver, follower = run_ranks(rank_disorder.dies_before_they_meet, folder)
    assert driver.died
    assert follower.value.startswith("RankError: The ranks cannot reach each other")


def test_an_interrupt_in_a_probe_stays_one(folder: str) -> None:
    driver, follower = values(run_ranks(rank_disorder.ends_in_a_probe, folder, "interrupt"))
    assert driver["first"].startswith("KeyboardInterrupt")
    assert follower["first"].startswith("RankError: Rank 0 has left generate_batch")
    for of_rank in (driver, follower):
        assert "RankError: Rank 0 failed (KeyboardInterrupt: ) while rank 1 went on" in of_rank["explained"]


def test_processes_forked_from_a_rank(folder: str, want: list[list[int]]) -> None:
    driver, follower = run_ranks(rank_disorder.forks, folder)
    assert follower.died
    assert driver.error is None
    assert driver.value["before"] == driver.value["after"] == want[:2]
    assert "This process was forked from rank 0's" in driver.value["child"]
    assert "Rank 1 is gone" in driver.value["error"]
    assert driver.value["seconds"] < 3, "a child of its was taken for the rank"


def test_a_message_in_the_middle_of_another(folder: str, want: list[list[int]]) -> None:
    assert values(run_ranks(rank_disorder.reentrant, folder)) == [want, want]


def test_managers_on_all_ranks(folder: str) -> None:
    driver, follower = values(run_ranks(rank_disorder.managers, folder))
    for of_rank in (driver, follower):
        assert not of_rank["running"] and of_rank["running again"] and of_rank["stopped"]
        assert "RankError" in of_rank["paused"] and "between calls" in of_rank["paused"]


@pytest.mark.parametrize("overlap", [False, True])
def test_random_traffic(folder: str, overlap: bool) -> None:
    model = make_model("Llama")
    found, _ = values(run_ranks(rank_disorder.traffic, folder, 3, overlap))
    assert len(found) > 15
    for prompt, tokens in found.values():
        assert tokens == generate_alone(model, prompt, greedy(len(tokens)))
