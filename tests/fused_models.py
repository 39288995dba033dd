"""What tests of fused steps share: a model with them in an engine, with a stand-in for recordings, and its weights.

Models are on a GPU where there is one, and else in Triton's interpreter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from recorded import Noting
from running import run_all
from tiny_models import generate_alone, greedy, make_model, make_prompts
from torch import Tensor

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.engine import Engine
from hf_cb.models.drawing import draw_by_kernel
from hf_cb.models.fused import gpu_stack
from hf_cb.models.fused.gpu_stack import CapturedFusedModel, FusedModel
from hf_cb.models.plan import plan_paged
from hf_cb.models.recorded.capture import cuda_captures

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = make_prompts([1, 9])
VALUES = [torch.ops.aten.nonzero.default, torch.ops.aten.equal.default, torch.ops.aten.masked_select.default]


class Again:
    """A Capture that does the work again, where launches cannot be noted. What waits for the device is an error."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        self._work = work
        with Noting() as noting:
            self._out = work()
        assert not [call[0] for call in noting.calls if call[0] in VALUES]
        return self._out

    def replay(self) -> None:
        self.replays += 1
        out = self._work()
        if isinstance(out, torch.Tensor):  # what is drawn lies in its place by itself
            self._out.copy_(out)


class Harness:
    """A model with fused steps in an engine; `captured`: with its decode steps recorded."""

    def __init__(self, model: Any, captured: bool = False, **options: Any) -> None:
        self.model, self.captures = model, []
        options = dict(block_size=4, max_num_seqs=2, max_model_len=32, num_blocks=40, attention="triton") | options
        options.setdefault("prefix_caching", False)
        plan = plan_paged(model, EngineConfig(**options))
        config = plan.config
        arguments = (model, plan.trace, plan.groups, plan.backend, config.num_blocks, config.block_size)
        if captured:
            self.runner: FusedModel = CapturedFusedModel(self._captures, draw_by_kernel, 2, 8, *arguments)
        else:
            self.runner = FusedModel(*arguments)
        self.engine = Engine(self.runner, config, sampler=DeviceSampler(draw_by_kernel))

    def _captures(self, device: torch.device) -> Callable[[], Any]:
        made = cuda_captures(device) if DEVICE.type == "cuda" else Again

        def note() -> Any:
            self.captures.append(made())
            return self.captures[-1]

        return note

    def tokens(self, new: int = 4) -> list[list[int]]:
        requests = [Request(f"r{i}", p, SamplingParams(new)) for i, p in enumerate(PROMPTS)]
        self.run(requests)
        return [r.output_ids for r in requests]

    def run(self, requests: list[Request]) -> None:
        run_all(self.engine, requests)


def make(family: str = "Llama", **changes: Any) -> Any:
    return make_model(family, **dict(num_hidden_layers=1) | changes).to(DEVICE)


def alone(model: Any, new: int = 4) -> list[list[int]]:
    """Of a copy, whose weights lie as generate finds them."""
    return [generate_alone(copy.deepcopy(model), p, greedy(new)) for p in PROMPTS]


def bits(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(now: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    assert now.keys() == before.keys() and all(torch.equal(now[name], value) for name, value in before.items())


def storage_bytes(model: Any) -> int:
    return sum({s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in model.parameters())}.values())


def is_merged(model: Any) -> bool:
    """Whether every product of several layers is one, on what the parameters are now."""
    fused = gpu_stack._fused[model]
    products = [product for product in fused.decoder.products if len(product.modules) > 1]
    return fused.is_current() and all(product._merged for product in products)
