"""Live displays for notebooks: answers side by side as they stream, and the engine's panel, updated in place."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from hf_cb.core import Delta
from hf_cb.errors import OptionError, missing
from hf_cb.html import card, side_by_side
from hf_cb.metrics.panel import panel

if TYPE_CHECKING:
    from hf_cb.manager.showing import Showing

REFRESH_S = 0.1  # a notebook's page takes no more
PANEL_S = 0.5


def live(deltas: Generator[Delta], titles: Sequence[str] | None = None) -> dict[str, str]:
    """Shows the answers of `model.stream_batch(...)` side by side while they come; returns their texts by request id.

    `titles` by the index of the prompt. An interrupt of the cell cancels what is left, and the model goes on.
    """
    texts: dict[str, str] = {}
    shown: dict[str, tuple[str, str, bool]] = {}  # title, note, whether it is a problem
    update = _in_place()
    drawn = 0.0
    with closing(deltas):
        try:
            for delta in deltas:
                title = titles[delta.index] if titles and delta.index < len(titles) else f"prompt {delta.index}"
                texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
                note = delta.error or (f"ended: {delta.finish_reason}" if delta.finish_reason else "…")
                shown[delta.request_id] = (title, note, delta.error is not None)
                if time.monotonic() - drawn > REFRESH_S:
                    update(_cards(shown, texts))
                    drawn = time.monotonic()
        finally:
            update(_cards(shown, texts))
    return texts


def _cards(shown: dict[str, tuple[str, str, bool]], texts: dict[str, str]) -> str:
    return side_by_side(card(title, texts[name], note, problem) for name, (title, note, problem) in shown.items())


class EngineDisplay:
    """A panel in a notebook that follows a manager until that ends, or `stop()`. Holds no manager alive."""

    def __init__(self, manager: Showing) -> None:
        self._manager = weakref.ref(manager)
        self._over = threading.Event()
        self._update = _in_place()
        self._update(_panel_of(manager))
        self._thread = threading.Thread(target=self._follow, name="hf_cb display", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The panel stays as it is."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(PANEL_S):
            manager = self._manager()
            if manager is None:
                return
            self._update(_panel_of(manager))
            if not manager.loop.is_running:
                return
            del manager  # not held while we wait


def _panel_of(manager: Showing) -> str:
    return panel(manager.stats(), manager.trace(), manager.loop.fatal_error)


def _in_place() -> Callable[[str], None]:
    """What shows HTML in the cell that runs now, each time in the place of what it showed before."""
    try:
        from IPython.display import HTML, display
    except ImportError as error:
        raise OptionError(missing("A live display", "notebook", error)) from error
    place: Any = display(HTML(""), display_id=True)

    def update(content: str) -> None:
        if place is not None:  # None outside of a notebook
            place.update(HTML(content))

    return update
