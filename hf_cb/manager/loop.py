"""The thread that owns an engine. Everybody else posts messages to its inbox and waits on its condition."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hf_cb.core import Update
from hf_cb.engine.engine import Engine
from hf_cb.errors import ManagerStoppedError, RequestCancelledError
from hf_cb.manager.openmp import release_idle_workers
from hf_cb.manager.training_mode import enter_eval, leave_eval

logger = logging.getLogger("hf_cb")


class EngineLoop:
    """Steps an engine while it has work.

    Args:
        engine: touched by the loop's thread alone once it runs.
        model: put in `eval()` while the loop runs.
        deliver: called with each step's updates, and at the end once with the error for requests that are left.
        num_threads: CPU threads of a step.
        train_mode_timeout: seconds that a step waits for somebody else's `train()` to end.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        deliver: Callable[[list[Update], BaseException | None], None],
        num_threads: int,
        train_mode_timeout: float,
    ) -> None:
        self.engine = engine
        self.model = model
        self.fatal_error: BaseException | None = None
        self._deliver = deliver
        self._num_threads = num_threads
        self._train_mode_timeout = train_mode_timeout
        self._thread: threading.Thread | None = None
        # guards what is below; the thread waits on it for messages, others wait on it for the thread
        self._changed = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._stopping: str | None = None  # None, "flush", "hard" or "destroyed"
        self._pauses = 0
        self._paused = False

    # -------------------------------------------------------------------------------------------------- by any thread

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def refuse_if_stopped(self) -> None:
        """Raises ManagerStoppedError if no more work is taken."""
        if self.fatal_error is not None:
            kind = type(self.fatal_error).__name__
            raise ManagerStoppedError(f"The manager has died: {kind}: {self.fatal_error}") from self.fatal_error
        if self._stopping is not None:
            raise ManagerStoppedError("The manager is stopped or stopping and takes no more requests.")

    def post(self, message: Callable[[], None]) -> None:
        """The thread will call `message` between two steps."""
        with self._changed:
            self._inbox.append(message)
            self._changed.notify_all()

    def post_work(self, message: Callable[[], None]) -> None:
        """`post`, unless no more work is taken: then ManagerStoppedError."""
        with self._changed:
            self.refuse_if_stopped()
            self.post(message)

    def start(self) -> None:
        with self._changed:
            if self._stopping == "destroyed":
                raise ManagerStoppedError("The manager was destroyed and cannot be started again.")
            if self.is_running:
                return
            self.fatal_error = None
            self._stopping = None
            release_idle_workers()  # the caller has probably just loaded the model
            enter_eval(self.model)
            self._thread = threading.Thread(target=self._run, name="hf_cb", daemon=True)
            self._thread.start()

    def stop(self, how: str) -> None:
        """Asks the thread to end: "flush" after all requests, "hard" after this step, "destroyed" for good."""
        with self._changed:
            if self._paused and self._pauses:
                raise RuntimeError("stop() inside pause() would wait for ever: leave the pause first.")
            if self._thread is not None or how == "destroyed":
                self._stopping = how
                self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            logger.warning("The generation thread has not ended after %s s.", timeout)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no step runs; afterwards no prefix is remembered, since the weights may have changed."""
        with self._changed:
            if not self.is_running:
                raise RuntimeError("pause() needs a running manager.")
            self._pauses += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._paused or not self.is_running)
        try:
            yield
        finally:
            with self._changed:
                self.engine.kv.drop_cache()
                self._pauses -= 1
                self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------- by its thread

    def _run(self) -> None:
        error: BaseException = RequestCancelledError("The manager was stopped before this request was finished.")
        try:
            torch.set_num_threads(self._num_threads)  # OpenMP keeps its settings by thread
            while self._next_messages():
                self._await_eval()
                self._deliver(self.engine.step(), None)
        except BaseException as fatal:
            logger.exception("The generation thread died")
            self.fatal_error = error = fatal
        finally:
            leave_eval(self.model)
            with self._changed:
                self._stopping = self._stopping or "hard"
                self._inbox.clear()
                self._paused = False
                self._changed.notify_all()
            self._drop_all()
            self._deliver([], error)

    def _next_messages(self) -> bool:
        """Handles the inbox; waits while there is nothing to do or somebody pauses; False when it is time to end."""
        while True:
            with self._changed:
                messages, self._inbox = self._inbox, []
            for message in messages:
                message()
            with self._changed:
                if self._inbox:
                    continue
                if self._stopping == "hard" or (self._stopping and not self.engine.has_work):
                    return False
                if self._pauses:
                    self._paused = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._pauses)
                    self._paused = False
                elif self.engine.has_work:
                    return True
                else:
                    self._changed.wait_for(lambda: self._inbox or self._stopping or self._pauses)

    def _await_eval(self) -> None:
        """Somebody has put the model in training mode: not our step to take, so wait for them."""
        if not self.model.training:
            return
        limit = self._train_mode_timeout
        logger.warning("The model is in training mode: generation waits up to %s s for model.eval().", limit)
        end = time.monotonic() + limit
        while self.model.training:
            if time.monotonic() > end:
                raise RuntimeError(
                    f"The model has been in training mode for {limit} s: train inside `with manager.pause():`, or call "
                    f"model.eval()."
                )
            time.sleep(0.01)

    def _drop_all(self) -> None:
        """Takes every request out of the engine."""
        scheduler = self.engine.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            request.in_flight = 0
            scheduler.remove(request)
