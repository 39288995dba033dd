"""What ranks of a tensor-parallel model do in `test_rank_disorder.py`: rank 0 leaves a call in the middle."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from rank_disorder import said
from rank_scenarios import PROMPTS, load, tokens
from tiny_models import greedy

from hf_cb.engine.engine import Engine
from hf_cb.manager.ranks.obeying import Obeying


def leaves(rank: int, folder: str) -> dict[str, Any]:
    """Rank 0 leaves a stream between two steps, and rank 1 looks what it has to do after its own has ended."""
    model, done = load(folder), 0
    step, do = Engine.step, Obeying.do

    def slow(engine: Engine) -> Any:
        time.sleep(0.5)
        return step(engine)

    def counted(*args: Any) -> Any:
        nonlocal done
        done += 1
        return do(*args)

    Engine.step, Obeying.do = slow, counted  # type: ignore[method-assign]
    stream = model.stream_batch(PROMPTS[:2], greedy(100))
    next(stream)
    seen: dict[str, Any] = {"said": said(stream.close) if rank == 0 else said(partial(list, stream))}
    before = done
    time.sleep(1.5)
    seen["done later"] = done - before
    seen["next"] = tokens(model.generate_batch(PROMPTS[:2], greedy(3)))
    return seen
