"""Whose requests are alive, by browser session, so that a stop button or a closed tab ends its own and no other's."""

from __future__ import annotations

import weakref
from collections import defaultdict

from hf_cb.manager.handle import Handle


class Visitors:
    """Holds no handle alive: one that nobody reads any more cancels its request by itself."""

    def __init__(self) -> None:
        self._handles: defaultdict[str, weakref.WeakSet[Handle]] = defaultdict(weakref.WeakSet)

    def asks(self, session: str, handle: Handle) -> None:
        """A visitor's new request."""
        self._handles[session].add(handle)

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
