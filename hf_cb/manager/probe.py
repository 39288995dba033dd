"""Which path is right for a model is measured, not listed.

Two requests run through an engine on each path, with chunks and decodes in one step, past windows of 8; the logits are
compared with those of `generate`'s own steps on one request alone. That happens on a tiny twin of the model where one
can be made; a few tokens on the model itself confirm it. The first path that agrees is taken.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_cb.config import EngineConfig
from hf_cb.core import Request, SamplingParams
from hf_cb.engine.engine import Engine
from hf_cb.engine.sampler import Sampled
from hf_cb.errors import HfCbError, RankError, UnsupportedModelError
from hf_cb.manager.openmp import single_threaded
from hf_cb.manager.paths import PATHS
from hf_cb.manager.ranks.leading import build_path, plan_path
from hf_cb.models.sharding import is_sharded
from hf_cb.models.twin import VOCAB, make_twin
from hf_cb.steps import Drawn, PlanPart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("hf_cb")

SMALL = 3_000_000  # parameters up to which a float32 model is its own twin
LENGTHS, NEW_TOKENS = (21, 5), 6  # on a twin: past a window of 8, in chunks
SHORT_LENGTHS, SHORT_NEW_TOKENS = (7, 3), 2  # on the model itself
BUDGET = 4  # tokens of a step: all prompts are cut into chunks
# how far logits may be apart, relative to the largest: rounding is far below, a wrong key far above
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# of a quantised model in half precision, whose twin has agreed: a quantised activation turns a last bit into a whole
# step, and kernels differ by the number of rows (measured: up to 0.12; a lost value: from 0.33)
QUANTISED = 0.25


@dataclass(frozen=True)
class Verdict:
    """The path that a model takes (one of `PATHS`), and why not a faster one."""

    path: str
    reason: str


class _DoesNotRun(UnsupportedModelError):
    """`generate`'s own steps fail, so there is nothing to compare with."""


_lock = threading.RLock()
_of_model: weakref.WeakKeyDictionary[PreTrainedModel, Verdict] = weakref.WeakKeyDictionary()
_of_architecture: dict[tuple[type, str], Verdict | None] = {}


def forget_verdict(model: PreTrainedModel) -> None:
    """It has changed since: it is judged again when it is next asked for."""
    with _lock:
        _of_model.pop(model, None)


def judge(model: PreTrainedModel) -> Verdict:
    """The verdict on a model in `eval()`; measured once for a model, and the twin's part once for an architecture.

    Raises:
        UnsupportedModelError: no path agrees with `generate`; the message says why for each.
    """
    with _lock:
        verdict = _of_model.get(model)
        if verdict is None:
            verdict = _of_model[model] = _judge(model)
            if verdict.path != "paged":
                name = type(model).__name__
                logger.warning("%s takes the %s path, which is slower: %s", name, verdict.path, verdict.reason)
        return verdict


def _judge(model: PreTrainedModel) -> Verdict:
    own = _small_copy(model)
    if own is not None:
        with single_threaded():
            return _first_right(own, LENGTHS, NEW_TOKENS, PATHS)
    of_twin = _judge_architecture(model)
    if of_twin is None:
        return _first_right(model, LENGTHS, NEW_TOKENS, PATHS)
    return _first_right(model, SHORT_LENGTHS, SHORT_NEW_TOKENS, PATHS[PATHS.index(of_twin.path) :], of_twin)


def judge_architecture(model: PreTrainedModel) -> Verdict | None:
    """The twin's part of the verdict, for which a model without weights is enough; None if it has no twin.

    Raises:
        UnsupportedModelError: no path agrees with `generate`.
    """
    with _lock:
        return _judge_architecture(model)


def _judge_architecture(model: PreTrainedModel) -> Verdict | None:
    key = (type(model), f"{model.config.to_json_string(use_diff=False)} {model.config._attn_implementation}")
    if key not in _of_architecture:
        _of_architecture[key] = _judge_twin(model)
    return _of_architecture[key]


def _judge_twin(model: PreTrainedModel) -> Verdict | None:
    """The verdict on a model's twin; None if there is none, or it does not run (its sizes may not fit together)."""
    twin = make_twin(model)
    if twin is None:
        return None
    try:
        with single_threaded():
            return _first_right(twin, LENGTHS, NEW_TOKENS, PATHS)
    except _DoesNotRun as error:
        logger.info("No tiny twin tells the path of %s: %s", type(model).__name__, error)
        return None


def _first_right(
    model: PreTrainedModel,
    lengths: Sequence[int],
    new_tokens: int,
    paths: Sequence[str],
    of_twin: Verdict | None = None,
) -> Verdict:
    """The first of the paths whose logits agree with each request's own, alone.

    Raises:
        UnsupportedModelError: `generate`'s own steps fail, or no path agrees with them; the message says why for each.
    """
    limit = TOLERANCE.get(model.dtype, 8e-2)
    if of_twin and getattr(model, "is_quantized", False) and model.dtype in (torch.float16, torch.bfloat16):
        limit = QUANTISED
    prompts = _prompts(model, lengths)
    want = _alone(model, prompts, new_tokens)
    forced = {name: [int(row.argmax()) for row in rows] for name, rows in want.items()}
    why = [of_twin.reason] if of_twin and of_twin.reason else []
    for path in paths:
        try:
            engine = _build(path, model)
            got = _run(engine, prompts, new_tokens, forced).seen
        except (MemoryError, torch.OutOfMemoryError, RankError):
            raise  # says nothing about the path
        except Exception as error:
            said = str(error) if isinstance(error, HfCbError) else f"it ends with {type(error).__name__}: {error}"
            why.append(f"{path}: {said}")
            continue
        off = max(_distance(a, b) for name in want for a, b in zip(want[name], got[name], strict=True))
        if off <= max(limit, _limit_of_layers(engine)):
            return Verdict(path, "; ".join(why))
        why.append(f"{path}: its logits are not generate's (off by {off:.1g} times the largest one)")
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot be batched, as no path agrees with it: {'; '.join(why)}"
    )


def _limit_of_layers(engine: Engine) -> float:
    """Attention may be in another dtype than the weights (a forward that mixes precisions, as trainers wrap it)."""
    trace = getattr(engine.runner, "trace", None)
    return max((TOLERANCE.get(layer.dtype, 8e-2) for layer in trace.layers), default=0.0) if trace else 0.0


def _prompts(model: PreTrainedModel, lengths: Sequence[int]) -> dict[str, list[int]]:
    vocab = min(VOCAB, model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    return {f"r{i}": torch.randint(0, vocab, (n,), generator=generator).tolist() for i, n in enumerate(lengths)}


def _alone(model: PreTrainedModel, prompts: dict[str, list[int]], new_tokens: int) -> dict[str, list[Tensor]]:
    """The logits that `generate`'s own steps give each prompt, on a fresh model where that can be had."""
    name = type(model).__name__
    want: dict[str, list[Tensor]] = {}
    for request_id, prompt in prompts.items():
        try:
            want |= _run(_build("single", _small_copy(model) or model), {request_id: prompt}, new_tokens).seen
        except (MemoryError, torch.OutOfMemoryError, RankError):
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise _DoesNotRun(f"generate's own steps fail for {name} with text alone: {why}") from error
    if not all(row.isfinite().any() for rows in want.values() for row in rows):
        kind = str(model.dtype).removeprefix("torch.")
        raise _DoesNotRun(f"{name} computes NaN in {kind}, in generate's own steps too: load it in another dtype.")
    return want


def _build(path: str, model: PreTrainedModel) -> Engine:
    options = EngineConfig(block_size=4, max_batch_tokens=BUDGET, num_blocks=200)
    return build_path(path, model, plan_path(path, model, options))


def _distance(want: Tensor, got: Tensor) -> float:
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()) or not finite.any():
        return float("inf")
    return float((want - got)[finite].abs().max() / want[finite].abs().max().clamp(min=1e-6))


@dataclass
class _Recorder:
    """A sampling step that keeps every row of logits, and takes the tokens it is told to take."""

    forced: dict[str, list[int]] | None = None
    seen: dict[str, list[Tensor]] = field(default_factory=dict)

    def draws(self, parts: Sequence[PlanPart]) -> None:
        """Nothing: all rows of logits are wanted."""

    def sample(self, logits: Tensor | Drawn, parts: Sequence[PlanPart]) -> list[list[Sampled]]:
        assert isinstance(logits, Tensor)
        rows = iter(logits.float().cpu())
        return [[Sampled(self._token(part.request, next(rows))) for _ in range(part.samples)] for part in parts]

    def _token(self, request: Request, row: Tensor) -> int:
        seen = self.seen.setdefault(request.request_id, [])
        seen.append(row.clone())
        return self.forced[request.request_id][len(seen) - 1] if self.forced else int(row.argmax())


def _run(
    engine: Engine, prompts: dict[str, list[int]], new_tokens: int, forced: dict[str, list[int]] | None = None
) -> _Recorder:
    recorder = engine.sampler = _Recorder(forced)
    engine.recovers = False
    for name, prompt in prompts.items():
        engine.admit(Request(name, prompt, SamplingParams(new_tokens)))
        engine.step()  # so that the second prompt meets the first one's later chunks and decodes
    while engine.has_work:
        engine.step()
    return recorder


def _small_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """A copy of a small model; None for others, and where something on it (a wrapped weight, a lock) has no copy."""
    if not _is_small(model):
        return None
    try:
        return copy.deepcopy(model)
    except Exception:
        return None


def _is_small(model: PreTrainedModel) -> bool:
    return (
        model.dtype == torch.float32
        and model.device.type == "cpu"
        and not is_sharded(model)  # its copy would be no share of anything
        and sum(p.numel() for p in model.parameters()) <= SMALL
    )
