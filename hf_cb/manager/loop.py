"""The thread that owns an engine. Everybody else posts messages to its inbox."""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from torch import nn

from hf_cb.attention import interception
from hf_cb.engine.engine import Engine
from hf_cb.errors import ManagerStoppedError, RequestCancelledError, describe
from hf_cb.manager.bell import Bell
from hf_cb.manager.mailbox import Guard
from hf_cb.manager.openmp import release_idle_workers
from hf_cb.manager.running import note_ended, note_running
from hf_cb.manager.switching import switch_interval
from hf_cb.manager.thread import Cancel, Deliver, leave, nobody, run_while_alive
from hf_cb.manager.training_mode import TrainingWatch, enter_eval

logger = logging.getLogger("hf_cb")

POLL_S = 0.01  # how often a step looks whether somebody's training is over


class EngineLoop:
    """Steps an engine while it has work.

    Args:
        engine: touched by the loop's thread alone once it runs; `model` is in `eval()` then.
        deliver: called with each step's updates, and at the end once with the error for requests that are left.
        cancel: called with requests of `dropped`. Both are let go of at the end, so that their owner goes at once.
        num_threads: CPU threads of a step.
        switch_interval, train_mode_timeout: seconds that a busy Python thread, or somebody else's `train()`, may hold
            up a step.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        deliver: Deliver,
        cancel: Cancel,
        num_threads: int,
        switch_interval: float | None,
        train_mode_timeout: float,
    ) -> None:
        self.engine, self.model = engine, model
        self.fatal_error: BaseException | None = None
        # of handles that are gone: appended without a lock, wherever they are collected
        self.dropped: deque[Guard] = deque()
        self._deliver, self._cancel = deliver, cancel
        self._num_threads = num_threads
        self._switch_interval, self._training = switch_interval, TrainingWatch(model, train_mode_timeout)
        self._thread: threading.Thread | None = None  # in whose name the model is in eval(), and intercepted
        # the idle thread waits for it and holds nothing else of ours; finalizers put something in, our own end too
        self._news: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.lock = threading.RLock()  # guards what is below; under it nobody takes another
        self._inbox: list[Callable[[], None]] = []
        self._state = "new"  # then "running", then "ended", and again
        self._stopping: str | None = None  # None, "flush" or "hard"
        self._at_end: list[Callable[[], None]] = []
        self._pausers: dict[object, int] = {}  # each pause, and its thread
        self._destroyed, self._paused, self._pid = False, False, 0
        self._quiet = Bell()  # rung when a pause begins, or can no more

    # -------------------------------------------------------------------------------------------------- by any thread

    @property
    def is_running(self) -> bool:
        return self._state == "running" and self._pid == os.getpid()

    def check_may_wait(self) -> None:
        """Raises RuntimeError where waiting for a request would never end."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("The generation thread cannot wait for itself (in a processor, a stop check or a hook).")
        if self._is_pausing():
            raise RuntimeError("Inside pause() nothing is generated: leave the pause before you wait for a result.")
        if self._state == "running" and self._pid != os.getpid():
            raise ManagerStoppedError("This process was forked from the manager's: nothing is generated here.")

    def refuse_if_stopped(self) -> None:
        """Raises ManagerStoppedError if no more work is taken."""
        if self.fatal_error is not None:
            raise ManagerStoppedError(f"The manager has died: {describe(self.fatal_error)}") from self.fatal_error
        if self._state == "running" and self._pid != os.getpid():
            raise ManagerStoppedError("This process was forked from the manager's, and has no thread: make another.")
        if self._stopping is not None or self._destroyed or self._state == "ended":
            raise ManagerStoppedError("The manager is stopped or stopping and takes no more requests.")

    def post(self, message: Callable[[], None]) -> None:
        """The thread will call `message` between two steps; a thread that has ended forgets it."""
        with self.lock:
            if self._state != "ended":
                self._inbox.append(message)
                self._news.put(None)

    def post_work(self, message: Callable[[], None]) -> None:
        """`post`, unless no more work is taken: then ManagerStoppedError."""
        with self.lock:
            self.refuse_if_stopped()
            self.post(message)

    def start(self, deliver: Deliver, cancel: Cancel) -> None:
        """Starts the thread, after the one before it if that is still ending."""
        with self.lock:
            if self._state == "running" and self._stopping is None:
                return
        self.join()
        args = weakref.ref(self, self._news.put), weakref.ref(self.model), self._news, self._num_threads
        thread = threading.Thread(target=run_while_alive, args=args, name="hf_cb", daemon=True)
        try:
            interception.install(thread)  # these take locks of their own
            enter_eval(self.model, thread)
            note_running(self)
            with self.lock:
                if self._destroyed:
                    raise ManagerStoppedError("The manager was destroyed and cannot be started again.")
                if self._state == "running":
                    return
                self._deliver, self._cancel = deliver, cancel
                self._pid, self.fatal_error, self._stopping = os.getpid(), None, None
                self.engine.scheduler.expect(True)  # also behind a session that had no more
                release_idle_workers()  # the caller has probably just loaded the model
                before, self._thread, self._state = self._state, thread, "running"
                try:
                    thread.start()
                finally:
                    if thread.ident is None:  # there was none to be had, or not in time: then it will not work
                        self._thread, self._state = None, before
        finally:
            if self._thread is not thread:
                leave(self.model, thread)

    def at_end(self, call: Callable[[], None]) -> bool:
        """The thread's last act will be to call it; False if it was not told to end, or has ended."""
        with self.lock:
            if not self.is_running or self._stopping is None:
                return False
            self._at_end.append(call)
            return True

    def stop(self, hard: bool = False, destroy: bool = False) -> None:
        """Asks the thread to end, after all requests or after this step. What is asked for is never taken back."""
        with self.lock:
            self._destroyed |= destroy
            if self._state == "running":
                self._stopping = "hard" if hard or self._stopping == "hard" else "flush"
                self._news.put(None)
                return
            never_started = self._state == "new" and destroy
            self._state = "ended" if never_started else self._state
        if never_started:
            self._deliver([], RequestCancelledError("The manager was destroyed before it was started."))

    def check_may_join(self) -> None:
        """Raises RuntimeError where the thread would never end."""
        if self._is_pausing():
            raise RuntimeError("stop() inside pause() would wait for ever: leave the pause first.")

    def join(self, timeout: float | None = None) -> None:
        if timeout is None:
            self.check_may_join()
        with self.lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            logger.warning("The generation thread has not ended after %s s.", timeout)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no step runs; afterwards no prefix is remembered, since the weights may have changed."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("The generation thread cannot pause itself (in a processor, a stop check or a hook).")
        mine = object()
        try:
            with self.lock:
                if not self.is_running:
                    raise RuntimeError("pause() needs a running manager.")
                self._pausers[mine] = threading.get_ident()
                self._news.put(None)
            self._quiet.wait_for(lambda: self._paused or not self.is_running)
            if not self._paused:
                raise RuntimeError("The generation thread ended before it could pause.") from self.fatal_error
            yield
        finally:
            try:  # no lock, and no Python code: an interrupt there would leave the thread paused for good
                self._pausers.pop(mine, None)
            finally:
                self._news.put(None)

    def abandon_pauses(self) -> None:
        """Nobody will leave them any more."""
        self._pausers.clear()
        self._news.put(None)

    def _is_pausing(self) -> bool:
        return threading.get_ident() in self._pausers.values()

    # ------------------------------------------------------------------------------------------------- by its thread

    def work(self) -> float | None:
        """Steps while there is work. Then for how many seconds there is none without news; None: no more comes."""
        error: BaseException = RequestCancelledError("The manager was stopped before this request was finished.")
        with self.lock:
            if threading.current_thread() is not self._thread:
                return None  # `start` was interrupted when this thread was already there
        try:
            with switch_interval(self._switch_interval):
                while (next_move := self._next_move()) == "step":
                    self._deliver(self.engine.step(), None)
                if next_move == "wait":
                    return self.engine.idle_s()
        except BaseException as fatal:
            logger.exception("The generation thread died")
            self.fatal_error = error = fatal
        self._end(error)
        return None

    def _end(self, error: BaseException) -> None:
        """Everybody who waits is woken, whatever else goes wrong."""
        with self.lock:
            self._state = "ended"
            self._inbox.clear()
            self.dropped.clear()
            self._paused = False
            self._quiet.ring()
            at_end, self._at_end = self._at_end, []
        leaving = partial(leave, self.model, threading.current_thread())
        tidying: list[Callable[[], object]] = [self.engine.drop_all, partial(self._deliver, [], error), leaving]
        for clean_up in [*tidying, *at_end]:
            try:
                clean_up()
            except Exception:
                logger.exception("Cleaning up after the generation thread failed")
        self._deliver, self._cancel = nobody, nobody
        note_ended(self)

    def _next_move(self) -> str:
        """Handles the inbox, and waits while somebody pauses or trains. Then "step", "wait" (for news) or "end"."""
        while True:
            while not self._news.empty():
                self._news.get()
            gone = [self.dropped.popleft() for _ in range(len(self.dropped))]  # before the messages that admit them
            with self.lock:
                messages, self._inbox = self._inbox, []
            for message in messages:
                message()
            for guard in gone:
                self._cancel(guard.requests)
            self.engine.scheduler.close(self._stopping is not None)
            training = self._is_training()
            if self._pausers or training:
                self._deliver(self.engine.settle(), None)
            with self.lock:
                if self._stopping == "hard":
                    return "end"
                pausing = bool(self._pausers) and self.engine.is_settled
                if not (pausing or training):
                    if self.engine.idle_s() == 0:
                        return "step"  # also if messages keep coming
                    if not self._inbox:
                        return "wait" if self.engine.has_work or not self._stopping else "end"
            if pausing:
                self._stay_paused()
            elif training:
                with suppress(queue.Empty):
                    self._news.get(timeout=POLL_S)

    def _stay_paused(self) -> None:
        self.engine.runner.lend()
        self._paused = True
        self._quiet.ring()
        while self._paused:
            self._news.get()  # whoever leaves has put something in
            with self.lock:  # nobody can begin a pause between the look and what follows from it
                if not self._pausers:
                    self.engine.kv.drop_cache()
                    self._training.since = None  # in there it may take as long as it likes
                    self._paused = False

    def _is_training(self) -> bool:
        """Whether somebody trains the model while there is work: then it is not our step to take."""
        was_training = self._training.since is not None
        if self._training.goes_on(self.engine.has_work, bool(self._pausers)):
            self._deliver(self.engine.expire(), None)
            return True
        if was_training:
            self.engine.kv.drop_cache()  # training means other weights
        return False
