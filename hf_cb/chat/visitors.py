"""Whose requests are alive, by browser session, so that a stop button or a closed tab ends its own and no other's."""

from __future__ import annotations

import weakref
from collections import defaultdict

from hf_cb.manager.handle import Handle


class Visitors:
    """Holds no handle alive: one that nobody reads any more cancels its request by itself."""

    def __init__(self) -> None:
        self._handles: defaultdict[str, weakref.WeakSet[Handle]] = defaultdict(weakref.WeakSet)
        self._turns: dict[str, object] = {}  # by session, the one whose answer is shown

    def begins(self, session: str) -> object:
        """A visitor's new turn, or an empty page. Ends the turn before it, whose answer has no place any more."""
        self.stop(session)
        turn = self._turns[session] = object()
        return turn

    def is_shown(self, session: str, turn: object) -> bool:
        return self._turns.get(session) is turn

    def asks(self, session: str, turn: object, handle: Handle) -> None:
        """A turn's request."""
        self._handles[session].add(handle)
        if not self.is_shown(session, turn):  # over before it was submitted
            handle.cancel()

    def waits(self, session: str) -> bool:
        """Whether an answer to this visitor is still coming."""
        return any(not handle.done for handle in list(self._handles.get(session, ())))

    def stop(self, session: str) -> None:
        """Ends what this visitor waits for."""
        for handle in list(self._handles.get(session, ())):
            handle.cancel()

    def leave(self, session: str) -> None:
        """The visitor's tab is closed."""
        self.stop(session)
        self._handles.pop(session, None)
        self._turns.pop(session, None)
