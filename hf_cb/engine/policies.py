"""In which order requests are served. A policy is one small class; `EngineConfig(policy=...)` takes a user's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from hf_cb.core import Request
from hf_cb.errors import OptionError


class Policy(Protocol):
    """Decides the order; the scheduler keeps the budgets."""

    name: str

    def order(self, running: Sequence[Request], waiting: Sequence[Request]) -> Iterable[Request]:
        """Who is offered a share of this step, first to last. `running` and `waiting` are in order of arrival."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Who gives its blocks back when they run out; it is computed again later."""
        ...


class Fifo:
    """Decodes first, then running prompts, then new ones in order of arrival; the newest gives way."""

    name = "fifo"

    def order(self, running: Sequence[Request], waiting: Sequence[Request]) -> Iterable[Request]:
        yield from sorted(running, key=lambda r: not r.is_decoding)
        yield from waiting

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=lambda r: r.arrival)


class PrefillFirst(Fifo):
    """Prompts first, so that first tokens come soon; running answers pay for it."""

    name = "prefill_first"

    def order(self, running: Sequence[Request], waiting: Sequence[Request]) -> Iterable[Request]:
        yield from (r for r in running if not r.is_decoding)
        yield from waiting
        yield from (r for r in running if r.is_decoding)


POLICIES = {policy.name: policy for policy in (Fifo, PrefillFirst)}


def make_policy(policy: Any) -> Policy:
    """The policy of that name, or the user's own object."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise OptionError(f"policy={policy!r} is unknown; the policies are {', '.join(POLICIES)}.")
        return POLICIES[policy]()
    if not callable(getattr(policy, "order", None)) or not callable(getattr(policy, "victim", None)):
        raise OptionError(f"policy must be a name or an object with order() and victim(), not {policy!r}.")
    return policy
