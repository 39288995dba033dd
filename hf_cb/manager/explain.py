"""What hf_cb does with a model, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_cb.config import EngineConfig
from hf_cb.errors import HfCbError
from hf_cb.manager.build import plan_engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Explanation:
    """Printed, it is a few lines of text; `path` is "paged", "dense", "recompute" or "refused"."""

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
    except HfCbError as refusal:
        return Explanation(name, "refused", str(refusal))
    groups = []
    for group in plan.groups if plan.backend else ():
        layer = plan.trace.layers[group.layers[0]]
        kind = f"window {group.window}" if group.window else f"chunk {group.chunk}" if group.chunk else "full attention"
        groups.append(
            f"{len(group.layers)} with {kind}: {layer.num_heads} heads, {layer.num_kv_heads} KV heads of "
            f"{layer.head_dim}, {str(layer.dtype).removeprefix('torch.')} on {layer.device}"
        )
    values = {name: f"{getattr(plan.config, name)} ({reason})" for name, reason in plan.config.reasons.items()}
    values["kv_cache"] = (
        f"{plan.config.num_blocks * plan.block_bytes / 2**20:.0f} MiB ({plan.block_bytes} bytes a block)"
    )
    return Explanation(
        model=name,
        path=verdict.path,
        reason=verdict.reason or "its logits are those of generate",
        backend=plan.backend.name if plan.backend else None,
        backend_reason=plan.backend_reason,
        layers=groups,
        config=values,
    )
