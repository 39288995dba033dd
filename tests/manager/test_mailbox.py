"""A mailbox between threads: nobody who waits is forgotten, and who sees the end has seen all."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable
from typing import Any

from hf_cb.core import Request, SamplingParams, Status, Update
from hf_cb.manager.bell import Bell
from hf_cb.manager.handle import Handle, Reader
from hf_cb.manager.mailbox import Mailbox, make_output
from hf_cb.manager.router import OutputQueue, Router

TURNS = 2000


def test_an_output_is_taken_without_a_look_at_those_behind_it() -> None:
    """There may be thousands, and each is taken while the engine waits to put in the next."""

    class Unseen:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    outputs = OutputQueue()
    outputs.put(first := make_output(make()[0]))
    outputs.put(Unseen())
    assert outputs.get() is first


def test_news_of_a_request_that_was_taken_back_reach_nobody() -> None:
    """It was refused when the manager had just ended all requests that it knew."""
    router, (request, mailbox) = Router(), make()
    router.attach(request, mailbox)
    router.detach(request)
    router.deliver([Update(request, [])], RuntimeError("ended"))
    assert router.queue.get(timeout=0) is None and not mailbox.done


class Interrupted(list):
    """A list on which something happens just before it grows, or just after it was read."""

    def __init__(self, before_growth: Callable[[], None] = list, after_look: Callable[[], None] = list) -> None:
        super().__init__()
        self.before_growth, self.after_look = before_growth, after_look

    def extend(self, items: Any) -> None:
        self.before_growth()
        super().extend(items)

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.after_look()
        return found


def make(new_tokens: int = 9) -> tuple[Request, Mailbox]:
    request = Request("r", [1], SamplingParams(new_tokens))
    return request, Mailbox([request])


def test_threads_that_wait_are_woken_for_every_token() -> None:
    request, mailbox = make(TURNS)
    tokens, seen = mailbox.streams[0].token_ids, threading.Semaphore(0)

    def read() -> None:
        for turn in range(TURNS):
            mailbox.wait_for(lambda turn=turn: len(tokens) > turn)
            seen.release()

    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(TURNS):
        mailbox.push(request, [turn], None)
        for _ in readers:
            assert seen.acquire(timeout=60), f"nobody was woken for token {turn}"
    for reader in readers:
        reader.join()


def test_who_begins_to_wait_in_the_middle_of_a_push_is_woken_by_it() -> None:
    request, mailbox = make()
    tokens = mailbox.streams[0].token_ids = Interrupted(before_growth=lambda: begin_to_wait())
    looked = threading.Event()

    def has_come() -> bool:
        found = len(tokens) > 0
        looked.set()
        return found

    reader = threading.Thread(target=mailbox.wait_for, args=(has_come,), daemon=True)

    def begin_to_wait() -> None:
        reader.start()
        assert looked.wait(60)

    mailbox.push(request, [5], None)
    reader.join(60)
    assert not reader.is_alive()


def test_who_ceases_to_wait_in_the_middle_of_a_ring_does_no_harm() -> None:
    """A garbage collection inside it may run other threads."""
    bell, kept, threshold = Bell(), [], gc.get_threshold()

    def cease(*_: Any) -> None:
        if bell._ears:
            bell._ears.pop()

    gc.callbacks.append(cease)
    gc.set_threshold(1)
    try:
        for turn in range(30):
            bell._ears |= {queue.SimpleQueue() for _ in range(30)}
            kept.append([[] for _ in range(turn % 3)])  # so that a collection is due at another place each time
            bell.ring()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(cease)
    assert len(bell._ears) < 900


def test_an_end_that_comes_while_tokens_are_read_takes_none_of_them_away() -> None:
    request, mailbox = make()
    news = iter([[3]])

    def end() -> None:
        for new in news:
            request.status, request.finish_reason = Status.FINISHED, "length"
            mailbox.push(request, new, make_output(request))

    mailbox.streams[0].token_ids = Interrupted(after_look=end)
    mailbox.push(request, [1, 2], None)
    reader = Reader(Handle(mailbox, cancel=list, dropped=list, check=list, explain=lambda *_: ""))
    deltas = [*reader.read(), *reader.read()]
    assert [d.token_ids for d in deltas] == [[1, 2], [3]] and deltas[-1].finish_reason == "length" and reader.at_end


def test_a_waker_that_leaves_takes_no_other_with_it() -> None:
    request, mailbox = make()
    first, second = (None, list), (None, dict)
    for waker in (first, second, first):
        mailbox.add_waker(waker)
    during = mailbox.push(request, [1], None)
    mailbox.remove_waker(first)
    assert during == (first, second, first) and mailbox.push(request, [2], None) == (second, first)
