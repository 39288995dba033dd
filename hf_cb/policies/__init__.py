"""Whose turn it is. `EngineConfig(policy=...)` takes a name, a name with parameters, or an object of these classes.

A policy decides the order, and who waits; the scheduler keeps the budgets. docs/policies.md says what each is for.
"""

from __future__ import annotations

from hf_cb.policies.base import Continuous, Policy, PrefillFirst, Situation
from hf_cb.policies.batches import Dynamic, Static
from hf_cb.policies.fair import Fair
from hf_cb.policies.names import POLICIES, make_policy
from hf_cb.policies.ranked import Deadline, LongestPrefix, Priority

__all__ = [
    "POLICIES",
    "Continuous",
    "Deadline",
    "Dynamic",
    "Fair",
    "LongestPrefix",
    "Policy",
    "PrefillFirst",
    "Priority",
    "Situation",
    "Static",
    "make_policy",
]
