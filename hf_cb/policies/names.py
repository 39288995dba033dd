"""Policies by name, as a config or a command line says them: "static:8", "dynamic:8:0.05", "dynamic:window=0.1".

Parameters follow the name after colons, in the order of the class or by their names; any others are users' weights
("fair:alice=2:bob=1"). There are no commas and no brackets, so a shell and a list of settings take them as they are.
"""

from __future__ import annotations

import inspect
from typing import Any

from hf_cb.errors import OptionError
from hf_cb.policies.base import Continuous, Policy, PrefillFirst
from hf_cb.policies.batches import Dynamic, Static
from hf_cb.policies.fair import Fair
from hf_cb.policies.ranked import Deadline, LongestPrefix, Priority

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Continuous, PrefillFirst, Priority, Fair, Deadline, LongestPrefix, Static, Dynamic)
}
ALIASES = {"fifo": "continuous", "inflight": "continuous", "iteration": "continuous"}


def make_policy(policy: Any) -> Policy:
    """The policy of that name, or the user's own object.

    Raises:
        OptionError: an unknown name, a wrong parameter, or something that is no policy.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise OptionError(f"policy must be a name or an object of an hf_cb.policies.Policy class, not {policy!r}.")
    name, *given = policy.split(":")
    found = POLICIES.get(ALIASES.get(name, name))
    if found is None:
        raise OptionError(f"policy={policy!r} is unknown; the policies are {', '.join([*POLICIES, *ALIASES])}.")
    return found(**_parameters(policy, found, given))


def _parameters(policy: str, found: type[Policy], given: list[str]) -> dict[str, Any]:
    known = list(inspect.signature(found).parameters)
    in_order = [name for name in known if name != "weights"]
    parameters: dict[str, Any] = {}
    for place, text in enumerate(given):
        name, equals, value = text.rpartition("=")
        if not equals:
            name = in_order[place] if place < len(in_order) else ""
        number = _number(value)
        weights = parameters.get("weights", {})
        if number is None or name in {"", *parameters, *weights}:
            name = ""  # no number, no name, or a name for the second time
        if name in in_order:
            parameters[name] = number
        elif name and equals and "weights" in known:
            parameters["weights"] = weights | {name: number}
        else:
            usage = ":".join([found.name, *(f"{name}=NUMBER" for name in in_order)])
            users = ", and USER=NUMBER for a user's weight" if "weights" in known else ""
            raise OptionError(
                f"policy={policy!r}: {text!r} is not understood; write {usage!r}{users}, or fewer of them."
            )
    return parameters


def _number(text: str) -> int | float | None:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None
