"""A mailbox between threads: nobody who waits is forgotten, and who sees the end has seen all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from hf_cb.core import Request, SamplingParams, Status
from hf_cb.manager.handle import Handle, Reader
from hf_cb.manager.mailbox import Mailbox, make_output

TURNS = 3000


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    """Threads meet in the middle of what others do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def ended(request: Request) -> Request:
    request.status, request.finish_reason = Status.FINISHED, "length"
    return request


def test_who_looks_while_news_come_is_woken() -> None:
    """Each token comes while the reader is about to wait for it, or waits, or has just looked: a lost wake hangs."""
    request = Request("r", [1], SamplingParams(TURNS))
    mailbox, seen = Mailbox([request]), threading.Semaphore(0)
    tokens = mailbox.streams[0].token_ids

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


def test_who_sees_the_end_has_all_tokens() -> None:
    for _ in range(200):
        request = Request("r", [1], SamplingParams(2))
        mailbox = Mailbox([request])
        reader = Reader(Handle(mailbox, cancel=list, drop=list, check=list, explain=lambda *_: ""))
        found: list[int] = []

        def read(reader: Reader = reader, found: list[int] = found) -> None:
            while not reader.at_end:
                for delta in reader.read():
                    found.extend(delta.token_ids)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        mailbox.push(request, [1, 2], None)
        mailbox.push(request, [3], make_output(ended(request)))
        thread.join(60)
        assert found == [1, 2, 3]


def test_a_waker_that_leaves_takes_no_other_with_it() -> None:
    request = Request("r", [1], SamplingParams(9))
    mailbox = Mailbox([request])
    first, second = (None, list), (None, dict)
    mailbox.add_waker(first)
    mailbox.add_waker(second)
    mailbox.add_waker(first)
    during = mailbox.push(request, [1], None)
    mailbox.remove_waker(first)
    assert during == (first, second, first) and mailbox.push(request, [2], None) == (second, first)
