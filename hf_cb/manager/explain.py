"""What hf_cb does with a model, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_cb.config import EngineConfig
from hf_cb.errors import HfCbError, RankError
from hf_cb.manager.build import plan_engine
from hf_cb.manager.training_mode import in_eval
from hf_cb.models.fused.stack import what_runs
from hf_cb.models.plan import ModelPlan
from hf_cb.modules.wanted import wanted

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Explanation:
    """Printed, it is a few lines of text; `path` is one of `paths.PATHS` or "refused"."""

    model: str
    path: str
    reason: str
    backend: str | None = None
    backend_reason: str | None = None
    modules: str = "off"
    layers: list[str] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.path} ({self.reason})"]
        if self.backend is not None:
            lines.append(f"attention backend: {self.backend} ({self.backend_reason})")
        lines.append(f"modules: {self.modules}")
        lines += [f"layers: {group}" for group in self.layers]
        lines += [f"{name} = {value}" for name, value in self.config.items()]
        return "\n".join(lines)


def explain(model: PreTrainedModel, options: EngineConfig) -> Explanation:
    """Which path, backend and sizes the model would get. Runs a few tokens through it the first time."""
    name = type(model).__name__
    try:
        verdict, plan = plan_engine(model, options)
    except RankError:
        raise  # says nothing about the model
    except HfCbError as refusal:
        return Explanation(name, "refused", str(refusal))
    modules = _modules(model, options, plan)
    values = {name: f"{getattr(plan.config, name)} ({reason})" for name, reason in plan.config.reasons.items()}
    kept = f" of {options.kv_dtype}" if options.kv_dtype else ""
    values["kv_cache"] = (
        f"{plan.config.num_blocks * plan.block_bytes / 2**20:.0f} MiB{kept} ({plan.block_bytes} bytes a block)"
    )
    return Explanation(
        model=name,
        path=verdict.path,
        reason=verdict.reason or "its logits are those of generate",
        backend=plan.backend.name if plan.backend else None,
        backend_reason=plan.backend_reason,
        modules=modules,
        layers=_layers(plan),
        config=values,
    )


def _modules(model: PreTrainedModel, options: EngineConfig, plan: ModelPlan) -> str:
    """What the layers run as; for a model that was not accelerated, what `accelerate` would add."""
    mode = options.modules or wanted(model)
    if plan.backend is None or (mode == "off" and options.modules is not None):
        return "off"
    with in_eval(model):
        runs = what_runs(model, plan, "fused" if mode == "off" else mode)
    return f"off; with hf_cb.accelerate(model): {runs}" if mode == "off" else runs


def _layers(plan: ModelPlan) -> list[str]:
    trace = plan.trace
    lines = []
    for group in plan.groups:
        if group.layers:
            layer = trace.layers[group.layers[0]]
            reach = [f"{kind} {size}" for kind, size in (("window", group.window), ("chunk", group.chunk)) if size]
            lines.append(
                f"{len(group.layers)} with {', '.join(reach) or 'full attention'}: {layer.num_heads} heads, "
                f"{layer.num_kv_heads} KV heads of {layer.head_dim}, {str(layer.dtype).removeprefix('torch.')} on "
                f"{layer.device}"
            )
    if trace.recurrent is not None:
        kinds = ", ".join(sorted({type(m).__name__ for m in trace.recurrent.modules}))
        lines.append(
            f"{len(trace.recurrent.modules)} with a state ({kinds}): {trace.recurrent.state_bytes} bytes a request; "
            "no prefix is shared"
        )
    return lines
