"""From a prompt and its options to the requests that an engine takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from hf_cb.config import EngineConfig
from hf_cb.core import Request
from hf_cb.engine.engine import Engine
from hf_cb.engine.limits import fit
from hf_cb.errors import OptionError
from hf_cb.options.recipe import Recipe
from hf_cb.seeds import derive_seed
from hf_cb.values import is_number, is_whole


def make_requests(
    prompt_ids: list[int],
    recipe: Recipe,
    engine: Engine,
    next_id: Callable[[], str],
    config: EngineConfig,
    request_id: str | None = None,
    priority: int = 0,
    user: str | None = None,
    deadline: float | None = None,
    max_queue_time: float | None = None,
) -> list[Request]:
    """One request for each sequence, checked; all but the first are forks of it.

    Raises:
        PromptError, OptionError: about this request.
    """
    if request_id is not None and not isinstance(request_id, str):
        raise OptionError(f"request_id must be a string or None, not {request_id!r}.")
    _check_standing(priority, user)
    prompt_ids = recipe.truncated(prompt_ids)
    params = recipe.for_prompt(prompt_ids)
    if params.prompt_logprobs is not None and not engine.runner.scores_prompts:
        raise OptionError(
            "prompt_logprobs needs the logits of every token of a prompt, and this model is not driven in a way that "
            "gives them (see hf_cb.explain(model).path): call the model itself for them."
        )
    in_queue = config.max_queue_time if max_queue_time is None else max_queue_time
    times = (_time_from_now("deadline", deadline), _time_from_now("max_queue_time", in_queue))
    first = Request(request_id or "", prompt_ids, params, priority, user, *times)
    fit(first, engine.config, engine.kv)
    first.request_id = request_id or next_id()  # last, so that refused prompts use up no ids
    requests = [first]
    for i in range(1, recipe.num_return_sequences):
        own = recipe.for_prompt(prompt_ids, derive_seed(params.seed, i))
        child = Request(f"{first.request_id}__child#{i - 1}", prompt_ids, own, priority, user, *times, fork_of=first)
        child.prompt_logprobs = first.prompt_logprobs  # its prompt is scored once
        requests.append(child)
    return requests


def _check_standing(priority: int, user: str | None) -> None:
    if not is_whole(priority) or abs(priority) >= 2**31:
        raise OptionError(f"priority must be a whole number (smaller is more important), not {priority!r}.")
    if user is not None and not isinstance(user, str):
        raise OptionError(f"user must be a string or None, not {user!r}.")


def _time_from_now(name: str, seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if not is_number(seconds) or not seconds > 0:
        raise OptionError(f"{name} must be a positive number of seconds from now, not {seconds!r}.")
    return time.perf_counter() + seconds
