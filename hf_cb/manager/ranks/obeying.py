"""What a follower does of what the driver does: plans, builds and steps with its own share of the model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hf_cb.attention import interception
from hf_cb.config import EngineConfig
from hf_cb.manager import paths
from hf_cb.manager.training_mode import in_eval
from hf_cb.models.device import device_of
from hf_cb.models.parallel import FollowingRunner, Header
from hf_cb.models.plan import ModelPlan, Need
from hf_cb.modules.wanted import Mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_cb.manager.ranks.follower import Follower

KEPT_PLANS = 64  # most are built at once, and those of `explain` never


class Obeying:
    """The worker of a follower; used by its thread alone."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._usual_threads = torch.get_num_threads()
        self._plans: dict[int, ModelPlan] = {}
        self._runners: dict[int, FollowingRunner] = {}
        self._devices: set[torch.device] = set()
        self._borrowed = ExitStack()
        self._in_use: list[PreTrainedModel] = []

    def do(self, number: int, order: tuple[Any, ...]) -> Any:
        what, *details = order
        if what == "step":
            return self._step(*details)
        model = self._follower.model(details[0])
        self._use(model)
        if what == "plan":
            return self._plan(number, model, *details[1:])
        return self._build(number, model, *details[1:])

    def drop(self, key: int) -> None:
        self._runners.pop(key, None)

    def settle(self) -> None:
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def rest(self) -> None:
        self._borrowed.close()
        self._in_use.clear()

    def _plan(
        self, number: int, model: PreTrainedModel, path: str, options: EngineConfig, need: Need | None
    ) -> tuple[dict[str, int], Any]:
        torch.set_num_threads(options.num_threads or self._usual_threads)
        plan = paths.plan_path(path, model, options, need)
        self._plans[number] = plan
        while len(self._plans) > KEPT_PLANS:
            del self._plans[min(self._plans)]
        return plan.sizes, plan.layout

    def _build(
        self, number: int, model: PreTrainedModel, path: str, planned: int, sizes: dict[str, Any], modules: Mode
    ) -> bool:
        plan = self._plans.pop(planned)
        plan = replace(plan, config=replace(plan.config, **sizes))
        runner = paths.make_runner(path, model, plan, modules)
        self._runners[number] = FollowingRunner(runner, self._follower.group)
        return True

    def _step(self, key: int, header: Header) -> None:
        runner = self._runners[key]
        self._use(runner.inner.model)
        runner.forward(header)

    def _use(self, model: PreTrainedModel) -> None:
        """Until the driver's call is over: in `eval()`, with its attention reaching us."""
        if any(model is used for used in self._in_use):
            return
        device = device_of(model)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
            self._devices.add(device)
        self._in_use.append(model)
        self._borrowed.enter_context(in_eval(model))
        self._borrowed.enter_context(interception.installed())
