"""The manager of a tensor-parallel model on a rank that is not the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_cb.errors import RankError
from hf_cb.manager.ranks.team import RESTART

if TYPE_CHECKING:
    from hf_cb.core import GenerationOutput
    from hf_cb.manager.ranks.follower import Follower


class FollowingManager:
    """A manager on a rank that is not the driver: it takes no requests and has no results, and its thread is the
    driver's. Calls of transformers' own say so in transformers' words: None, or nothing."""

    is_tp_driver = False

    def __init__(self, team: Follower, number: int, ended: int) -> None:
        self._team = team
        self._number = number
        self._ends = ended  # how often the driver's will have stopped when this one has
        self._asked_to_stop = False

    def start(self) -> None:
        """The driver does, if it was not running."""
        if self._asked_to_stop or not self.is_running():
            self._ends += 1
            self._asked_to_stop = False

    def is_running(self) -> bool:
        return not self._team.is_over and self._team.ended.get(self._number, 0) < self._ends

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Waits, if it may, until the driver's manager has stopped."""
        self._asked_to_stop = True
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        self._team.wait_for_end(self._number, self._ends, timeout)

    def destroy(self) -> None:
        self.stop()

    def add_request(self, *_: Any, **__: Any) -> None:
        return None

    def add_requests(self, inputs: list[Any], *_: Any, **__: Any) -> list[None]:
        return [None for _ in inputs]

    def get_result(self, *_: Any, **__: Any) -> None:
        return None

    def __iter__(self) -> Iterator[GenerationOutput]:
        return iter(())

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        return iter(())

    def cancel_request(self, request_id: str) -> None:
        """The driver's requests are the driver's."""

    def register_result_handler(self, *_: Any) -> None:
        """There will be none."""

    def warmup(self) -> None:
        """Nothing is left to warm up."""

    def reset_prefix_cache(self) -> None:
        """The driver does: what prompts have in common is known there alone."""

    @property
    def background_thread_status(self) -> FollowerStatus:
        """Has `fatal_error`, as the driver's."""
        return FollowerStatus(RankError(f"{self._team.broken} {RESTART}") if self._team.broken else None)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RankError(
            f"Requests belong to rank 0, and this is rank {self._team.rank}: ask `if manager.is_tp_driver`, or call "
            f"model.generate_batch on every rank."
        )

    submit = stats = trace = display = record = _refuse

    def pause(self) -> AbstractContextManager[None]:
        """Not for several ranks."""
        return no_pause()


@dataclass(frozen=True)
class FollowerStatus:
    fatal_error: Exception | None


def no_pause() -> AbstractContextManager[None]:
    """In the place of a manager's `pause` on all ranks."""
    raise RankError(
        "pause() is for models of one process: nobody would tell the other ranks when it begins and ends. Change the "
        "weights of a tensor-parallel model between calls, on every rank."
    )
