"""The chat without a browser: what a turn sends to the model, what comes back, and what the panel says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from running import held_after
from tiny_models import make_model
from transformers import PreTrainedTokenizerFast

import hf_cb
from hf_cb.chat.conversation import Settings, answer, text_of, to_chat
from hf_cb.chat.visitors import Visitors
from hf_cb.manager.handle import Handle
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.metrics.panel import panel

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def manager(tokenizer: PreTrainedTokenizerFast) -> Iterator[ContinuousBatchingManager]:
    model = hf_cb.accelerate(make_model(), tokenizer, block_size=4, num_blocks=200)
    with model.continuous_batching_context_manager() as manager:
        yield manager
    hf_cb.restore(model)


def turn(manager: ContinuousBatchingManager, history: list[dict[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    async def run() -> list[dict[str, Any]]:
        return [message async for message in answer(manager, history, settings)]

    return asyncio.run(run())


def line_of(message: dict[str, Any]) -> str:
    assert len(message["content"]) == 2
    return message["content"][1]["text"]


def test_what_the_model_sees_of_a_history() -> None:
    figures = {"role": "assistant", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "<small>"}]}
    failed = {"role": "assistant", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "<small>"}]}
    too_long, last = {"role": "user", "content": "x" * 9000}, [{"type": "text", "text": "and?"}]
    history = [*HELLO, figures, too_long, failed, {"role": "user", "content": last}]
    chat = to_chat(history, "be brief")
    assert [m["content"] for m in chat] == ["be brief", "hello", "hi", "and?"]
    assert to_chat(HELLO, " ") == HELLO
    assert to_chat([failed, *HELLO], "") == HELLO


def test_a_turn_grows_and_ends_with_its_figures(manager: ContinuousBatchingManager) -> None:
    messages = turn(manager, HELLO, Settings(max_new_tokens=12, temperature=0))
    texts = [text_of(m) for m in messages]
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
    want = manager.submit(HELLO, max_new_tokens=12, do_sample=False).result()
    assert texts[-1] == want.text
    assert re.search(r"queue .* prefill .* first token .* tokens", line_of(messages[-1]))


def test_settings_are_each_persons_own(manager: ContinuousBatchingManager) -> None:
    async def both() -> list[str]:
        async def last(settings: Settings) -> str:
            text = ""
            async for message in answer(manager, HELLO, settings):
                text = text_of(message)
            return text

        seeded = Settings(max_new_tokens=12, temperature=1.5, seed=3)
        return await asyncio.gather(last(seeded), last(Settings(max_new_tokens=12, temperature=0)), last(seeded))

    sampled, greedy, again = asyncio.run(both())
    assert sampled == again != greedy


def test_errors_are_messages(manager: ContinuousBatchingManager) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    assert "tokens" in line_of(turn(manager, long, Settings())[-1])
    assert "repetition_penalty" in line_of(turn(manager, HELLO, Settings(repetition_penalty=float("nan")))[-1])
    manager.stop()
    last = turn(manager, HELLO, Settings())[-1]
    assert "stopped" in line_of(last) and "problem" in line_of(last)


def test_markup_in_an_error_is_text(manager: ContinuousBatchingManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("<script>")

    monkeypatch.setattr(manager, "submit", refuse)
    assert "&lt;script&gt;" in line_of(turn(manager, HELLO, Settings())[-1])


def test_leaving_in_the_middle_cancels(manager: ContinuousBatchingManager) -> None:
    handles: list[Handle] = []
    may_go_on = held_after(manager.engine, 4)

    async def leave() -> None:
        messages = answer(manager, HELLO, Settings(max_new_tokens=60, temperature=0), handles.append)
        async for _ in messages:
            break
        await messages.aclose()  # type: ignore[attr-defined]
        may_go_on.set()

    asyncio.run(leave())
    assert handles[0].outputs(timeout=10)[0].finish_reason == "cancelled"


def test_a_visitor_stops_their_own_answer(manager: ContinuousBatchingManager) -> None:
    visitors = Visitors()
    with manager.pause():
        mine, yours = (manager.submit(HELLO, max_new_tokens=60, do_sample=False, eos_token_id=-1) for _ in range(2))
        visitors.asks("me", visitors.begins("me"), mine)
        visitors.asks("you", visitors.begins("you"), yours)
        assert visitors.waits("you")
        visitors.leave("me")
    assert mine.outputs(timeout=10)[0].finish_reason == "cancelled"
    assert yours.result(timeout=10).finish_reason == "length"
    assert not visitors.waits("me") and not visitors.waits("you")
    visitors.stop("nobody")


def test_a_new_turn_ends_the_one_before(manager: ContinuousBatchingManager) -> None:
    visitors = Visitors()
    with manager.pause():
        early, late = (manager.submit(HELLO, max_new_tokens=60, do_sample=False, eos_token_id=-1) for _ in range(2))
        first = visitors.begins("me")
        visitors.asks("me", first, early)
        second = visitors.begins("me")
        visitors.asks("me", first, late)  # its turn was over before it was submitted
    assert not visitors.is_shown("me", first) and visitors.is_shown("me", second)
    assert [h.outputs(timeout=10)[0].finish_reason for h in (early, late)] == ["cancelled", "cancelled"]


def test_the_panel_says_how_things_stand(manager: ContinuousBatchingManager) -> None:
    assert "Idle." in panel(manager.stats(), manager.trace())
    manager.submit(HELLO, max_new_tokens=8, do_sample=False).result()
    shown = panel(manager.stats(), manager.trace())
    assert "<b data-name='finished'>1</b>" in shown and "class='prefill'" in shown and "class='decode'" in shown
    dead = panel(manager.stats(), manager.trace(), RuntimeError("<out> of luck"))
    assert "The engine has stopped" in dead and "&lt;out&gt;" in dead
