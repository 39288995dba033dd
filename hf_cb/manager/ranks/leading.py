"""Plans and engines for a model, wherever its layers are: on all ranks at once for a tensor-parallel one.

Every rank traces its own share of the heads and allocates its own KV cache; all take as many blocks as the rank with
the least memory can have, so that the driver's block tables hold everywhere.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_cb.config import EngineConfig
from hf_cb.engine.engine import Engine
from hf_cb.errors import OptionError
from hf_cb.manager import paths
from hf_cb.manager.ranks.meeting import driver_of
from hf_cb.models.parallel import LeadingRunner
from hf_cb.models.plan import ModelPlan, Need
from hf_cb.modules.wanted import Mode
from hf_cb.policies import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAN_GRACE_S = 10.0  # ranks that plan wait for each other in the beginning only
BUILD_GRACE_S = 600.0  # and those that allocate do not wait at all


def plan_path(path: str, model: PreTrainedModel, options: EngineConfig, need: Need | None = None) -> ModelPlan:
    """Sizes and, for the paged path, layers and backend; allocates nothing."""
    driver = driver_of(model)
    if driver is None:
        return paths.plan_path(path, model, options, need)
    order = ("plan", driver.number_of(model), path, replace(options, policy="continuous"), need)
    with driver.section(order, PLAN_GRACE_S) as section:
        plan = paths.plan_path(path, model, options, need)
        found = [(plan.sizes, plan.layout), *section.replies()]
    layouts = [layout for _, layout in found]
    if len(set(layouts)) > 1:
        raise OptionError(
            f"The ranks would lay out their KV caches differently (block size and groups: {layouts}), perhaps as not "
            f"all of them have the same attention backend: give attention= and block_size=."
        )
    least: dict[str, Any] = {name: min(sizes[name] for sizes, _ in found) for name in plan.sizes}
    config = replace(plan.config, **least)
    blocks = [sizes["num_blocks"] for sizes, _ in found]
    if len(set(blocks)) > 1:
        config.reasons["num_blocks"] = f"rank {blocks.index(min(blocks))} has room for no more; {blocks} on the ranks"
    return replace(plan, config=config, number=section.number)


def build_path(
    path: str, model: PreTrainedModel, plan: ModelPlan, policy: Policy | None = None, modules: Mode = "off"
) -> Engine:
    """An engine with its KV cache allocated."""
    driver = driver_of(model)
    if driver is None:
        return Engine(paths.make_runner(path, model, plan, modules), plan.config, policy)
    order = ("build", driver.number_of(model), path, plan.number, plan.sizes, modules)
    with driver.section(order, BUILD_GRACE_S) as section:
        try:
            inner = paths.make_runner(path, model, plan, modules)
            section.replies()
        except BaseException:
            driver.drop(section.number)
            raise
    runner = LeadingRunner(inner, driver.section, section.number, driver.group)
    weakref.finalize(runner, driver.drop, section.number).atexit = False
    return Engine(runner, plan.config, policy)
