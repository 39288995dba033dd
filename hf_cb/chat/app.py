"""The chat's page, in Gradio: everybody who opens it shares one manager, and so one batch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from hf_cb.chat.conversation import Message, Settings, answer, text_of
from hf_cb.chat.visitors import Visitors
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.metrics.panel import panel

REFRESH_S = 1.0  # of the panel
TITLE = "hf_cb chat"
# what a model writes may hold images and forms: none of them may reach another server
POLICY = "img-src 'self' data: blob:; media-src 'self' data: blob:; form-action 'none'; frame-src 'none'"


def build_app(manager: ContinuousBatchingManager, name: str) -> gr.Blocks:
    """The page for a running manager with a tokenizer that has a chat template; `name` is the model's, to be shown."""
    visitors = Visitors()

    async def respond(request: gr.Request, history: list[Message], *values: Any) -> AsyncIterator[Any]:
        session = str(request.session_hash)
        turn = visitors.begins(session)
        messages = answer(manager, history, _settings(*values), lambda h: visitors.asks(session, turn, h))
        async with aclosing(messages):
            async for message in messages:
                if not visitors.is_shown(session, turn):
                    yield gr.skip()  # what was yielded last would be shown once more at the end
                    return
                yield [*history, message]

    def ask(request: gr.Request, text: str, history: list[Message]) -> tuple[str, list[Message]]:
        if not text.strip():
            raise gr.Error("There is nothing to send yet.", print_exception=False)
        if visitors.waits(str(request.session_hash)):
            raise gr.Error("An answer is still coming: stop it first, or wait.", print_exception=False)
        return "", [*history, {"role": "user", "content": text}]

    def stop(request: gr.Request) -> None:
        visitors.stop(str(request.session_hash))

    def clear(request: gr.Request) -> list[Message]:
        visitors.begins(str(request.session_hash))
        return []

    def leave(request: gr.Request) -> None:
        visitors.leave(str(request.session_hash))

    def now() -> str:
        return panel(manager.stats(), manager.trace(), manager.loop.fatal_error)

    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_height=True) as app:
        with gr.Row(equal_height=False):
            with gr.Column(scale=3, min_width=320):
                chat = gr.Chatbot(
                    label=name,
                    elem_id="chat",
                    height="calc(100vh - 9rem)",
                    editable="user",
                    buttons=["copy"],
                    layout="bubble",
                )
                with gr.Row():
                    box = gr.Textbox(
                        placeholder="Ask something",
                        show_label=False,
                        container=False,
                        autofocus=True,
                        scale=6,
                        min_width=160,
                        elem_id="box",
                    )
                    send = gr.Button("Send", variant="primary", scale=1, min_width=72, elem_id="send")
                    halt = gr.Button("Stop", scale=1, min_width=72, elem_id="stop")
            with gr.Column(scale=1, min_width=300):
                engine = gr.HTML(now(), elem_id="engine")
                with gr.Accordion("Settings (yours alone)", open=False, elem_id="settings"):
                    settings = _settings_inputs()

        answering: dict[str, Any] = {
            "fn": respond,
            "inputs": [chat, *settings],
            "outputs": chat,
            "concurrency_limit": None,  # the engine batches them; nobody waits for another
            "show_progress": "hidden",
        }
        for event in (box.submit, send.click):
            event(ask, [box, chat], [box, chat], queue=False).success(**answering)
        chat.retry(_before, chat, chat, queue=False).then(**answering)
        chat.edit(_edited, chat, chat, queue=False).then(**answering)
        halt.click(stop, queue=False)
        # once at once, and once behind what is on its way to the page
        chat.clear(clear, outputs=chat, queue=False).then(clear, outputs=chat, show_progress="hidden")
        gr.Timer(REFRESH_S).tick(now, outputs=engine, show_progress="hidden", concurrency_limit=None, queue=False)
        app.unload(leave)
    return app


def appearance() -> dict[str, Any]:
    """Arguments of `launch` for the look of the page; no font or script comes from elsewhere."""
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    css = Path(__file__).with_name("style.css").read_text()
    return {"theme": theme, "css": css, "head": head, "footer_links": []}


def _settings_inputs() -> list[Any]:
    """In the order of `Settings`."""
    default = Settings()
    return [
        gr.Textbox(default.system, label="System prompt", lines=2),
        gr.Slider(1, 4096, default.max_new_tokens, step=1, label="Longest answer, in tokens"),
        gr.Slider(0.0, 2.0, default.temperature, step=0.05, label="Temperature (0: always the likeliest token)"),
        gr.Slider(0.05, 1.0, default.top_p, step=0.01, label="Top-p"),
        gr.Slider(1.0, 2.0, default.repetition_penalty, step=0.01, label="Repetition penalty"),
        gr.Textbox("", label="Seed (empty: another answer each time)"),
    ]


def _settings(
    system: str, max_new_tokens: float, temperature: float, top_p: float, repetition_penalty: float, seed: str
) -> Settings:
    try:
        number = int(seed) if seed.strip() else None
    except ValueError:
        raise gr.Error(f"The seed must be a whole number, or nothing, not {seed!r}.", print_exception=False) from None
    return Settings(system, int(max_new_tokens), temperature, top_p, repetition_penalty, number)


def _before(history: list[Message], data: gr.RetryData) -> list[Message]:
    """Up to the question whose answer is to be made anew."""
    return history[: _index(data.index) + 1]


def _edited(history: list[Message], data: gr.EditData) -> list[Message]:
    """Up to a question that has been changed."""
    index = _index(data.index)
    changed = text_of({"content": data.value})
    return [*history[:index], {"role": "user", "content": changed}]


def _index(index: Any) -> int:
    return index[0] if isinstance(index, (list, tuple)) else index
