"""What a policy of somebody else's answers, checked: a bug in it is told by the policy's name."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from hf_cb.core import Request
from hf_cb.policies.base import Policy, Situation
from hf_cb.values import is_number


def order_of(policy: Policy, situation: Situation) -> Iterable[Request]:
    """Raises RuntimeError for what is no order at all; whom it names is looked at one by one."""
    order = policy.order(situation)
    if not isinstance(order, Iterable):
        raise bug(policy, "order", f"returned {order!r}, and not an iterable of requests")
    return order


def wake_time_of(policy: Policy, situation: Situation) -> float | None:
    """Raises RuntimeError for what is no time."""
    wake = policy.wake_time(situation)
    if wake is not None and not is_number(wake):
        raise bug(policy, "wake_time", f"returned {wake!r}, and neither None nor seconds on the engine's clock")
    return wake


def insert(policy: Policy, queue: list[Request], request: Request) -> None:
    """Puts a request in its place; RuntimeError for ranks that cannot be compared."""
    try:
        insort(queue, request, key=policy.rank)
    except TypeError as error:
        raise bug(policy, "rank", f"does not put {request.request_id!r} in a place ({error})") from error


def misnamed(policy: Policy, method: str, named: object) -> RuntimeError:
    """A policy of somebody else's may name what has ended, or what another manager has: that would take blocks which
    nobody gives back."""
    what = f"{named.request_id!r}, which it was not asked about" if isinstance(named, Request) else repr(named)
    return bug(policy, method, f"names {what}")


def bug(policy: Policy, method: str, what: str) -> RuntimeError:
    return RuntimeError(f"{method}() of the policy {policy.name!r} {what}: a bug in the policy.")
