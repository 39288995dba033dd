"""What the ranks of a tensor-parallel model do in `test_tensor_parallel.py`: the same script on all of them."""

from __future__ import annotations

import logging
import os
import time
import warnings
from typing import Any

import torch
import transformers
from tiny_models import generate_alone, greedy, make_prompts
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_cb
from hf_cb import EngineConfig, OptionError
from hf_cb.attention import interception
from hf_cb.errors import RankError
from hf_cb.manager.ranks import driver, team

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

PROMPTS = make_prompts([20, 19, 18, 17, 16, 1, 40])
TINY = EngineConfig(block_size=4, num_blocks=20, max_batch_tokens=24)  # so few blocks that requests are preempted
CHUNKED = EngineConfig(block_size=4, max_batch_tokens=5)


def load(folder: str) -> PreTrainedModel:
    """The model with its layers spread over the ranks, accelerated."""
    warnings.simplefilter("ignore")
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    return hf_cb.accelerate(model)


def tokens(results: dict[str, hf_cb.GenerationOutput]) -> list[list[int]]:
    return [result.generated_tokens for result in results.values()]


def answers(rank: int, folder: str) -> dict[str, Any]:
    """Calls one after the other; what each rank has seen of them."""
    model = load(folder)
    model.train()
    seen: dict[str, Any] = {"explained": str(hf_cb.explain(model))}
    results = model.generate_batch(PROMPTS, greedy(), TINY)
    seen["tiny"], seen["reasons"] = tokens(results), [r.finish_reason for r in results.values()]
    seen["preemptions"] = sum(r.metrics.preemptions for r in results.values())
    seen["chunked"] = tokens(model.generate_batch(PROMPTS, greedy(), CHUNKED))
    overlapping = EngineConfig(block_size=4, max_batch_tokens=24, overlap=True)
    seen["overlapping"] = tokens(model.generate_batch(PROMPTS, greedy(), overlapping))
    sampled = greedy(do_sample=True, temperature=1.5, num_return_sequences=2)
    seen["sampled"] = tokens(model.generate_batch(PROMPTS[:3], sampled, seed=7))
    told = model.generate_batch(PROMPTS, greedy(), CHUNKED, logprobs=2, prompt_logprobs=1, output_logits=True)
    seen["prompt_logprobs"] = [r.prompt_logprobs for r in told.values()]
    seen["logits"] = [[row.tolist() for row in r.logits] for r in told.values()]
    seen["left to rank 0"] = tokens(model.generate_batch(PROMPTS[:2] if rank == 0 else None, greedy()))
    seen["stream"] = list(model.stream_batch(PROMPTS[:3], greedy()))
    seen["iterated"] = {result.index: result.generated_tokens for result in model.iterate_batch(PROMPTS, greedy())}
    seen["training"] = model.training
    model.eval()
    seen["alone"] = generate_alone(model, PROMPTS[0], greedy())
    hf_cb.restore(model)
    seen["interceptions"] = len(interception._users)
    distributed.barrier()  # the group is as good as before
    return seen


def errors(rank: int, folder: str) -> dict[str, Any]:
    """What goes wrong on all ranks alike, and does no harm to what comes after it."""
    model = load(folder)
    seen: dict[str, Any] = {}
    try:
        model.generate_batch(PROMPTS, greedy(), no_such_option=1)
    except OptionError as error:
        seen["option"] = str(error)
    prompts = [PROMPTS[0], [], PROMPTS[1]]
    results = model.generate_batch(prompts, greedy())
    seen["empty prompt"] = [(r.generated_tokens, r.finish_reason, type(r.exception).__name__) for r in results.values()]

    used = {t for r, p in zip(results.values(), prompts, strict=True) for t in (*p, *r.generated_tokens)}
    bad = next(t for t in range(8, 128) if t not in used)

    def refuse(_: Any, args: Any) -> None:
        if (args[0] == bad).any():
            raise ValueError("a token of ill repute")

    hook = model.get_input_embeddings().register_forward_pre_hook(refuse)
    results = model.generate_batch([PROMPTS[0], [5, bad, 7], PROMPTS[1]], greedy())
    seen["bad forward"] = [(r.generated_tokens, r.finish_reason, str(r.exception)) for r in results.values()]
    hook.remove()
    seen["after"] = tokens(model.generate_batch(PROMPTS, greedy(), TINY))
    return seen


def manage(rank: int, folder: str) -> dict[str, Any]:
    """Managers: the driver's are used, the others wait."""
    model = load(folder)
    seen: dict[str, Any] = {}
    with model.continuous_batching_context_manager(continuous_batching_config=TINY) as manager:
        if manager.is_tp_driver:
            handles = [manager.submit(p, greedy(30)) for p in PROMPTS]
            handles[2].cancel()
            seen["streamed"] = [t for delta in handles[0] for t in delta.token_ids]
            seen["results"] = [h.result().generated_tokens for h in handles[3:]]
            seen["cancelled"] = handles[2].result().finish_reason
        else:
            try:
                manager.submit(PROMPTS[0])
            except RankError as error:
                seen["refused"] = str(error)
            seen["nothing"] = [manager.add_request(PROMPTS[0]), manager.get_result(), list(manager)]
    seen["stopped"] = not manager.is_running()
    if manager.is_tp_driver:
        manager.engine.check_idle()
    manager = model.init_continuous_batching()
    manager.start()
    if manager.is_tp_driver:
        manager.add_request(PROMPTS[0], max_new_tokens=12, eos_token_id=-1)
        time.sleep(0.3)  # the others are to wait for it
    manager.stop(block=True)
    seen["stopped again"] = not manager.is_running()
    seen["polled"] = [output.generated_tokens for output in manager]
    # a manager that is kept, with its cache
    for name in ("first", "second"):
        results = model.generate_batch(PROMPTS, greedy(), EngineConfig(block_size=4), persistent_manager=True)
        seen[name] = tokens(results), sum(r.metrics.cached_tokens for r in results.values())
    model.destroy_cached_continuous_batching_manager()
    return seen


def least_memory(rank: int, folder: str) -> list[str]:
    """Rank 1 has less memory than the driver thinks that it has."""
    from hf_cb.models import plan

    model = load(folder)
    free = 10_000_000 if rank else 100_000_000
    plan.free_memory = lambda device: free  # type: ignore[assignment]
    lines = str(hf_cb.explain(model)).splitlines()
    return [line for line in lines if line.startswith("num_blocks")] + [str(model.generate_batch([[5]], greedy(1)))]


def others(rank: int, folders: list[str]) -> list[Any]:
    """Models with states, and with rotary embeddings by length, one after the other."""
    seen = []
    for folder in folders:
        model = load(folder)
        seen.append((tokens(model.generate_batch(PROMPTS, greedy(), CHUNKED)), hf_cb.explain(model).path))
    return seen


def failing(rank: int, folder: str, culprit: int, how: str) -> dict[str, Any]:
    """In the middle of a forward one rank fails alone; then everybody tries again."""
    logging.getLogger("hf_cb").setLevel(logging.ERROR)
    model = load(folder)
    model.generate_batch(PROMPTS[:2], greedy(2))  # nobody is new to anybody
    driver.SETTLE_S = 2.0
    forwards = 0

    def fail(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 4:
            if how == "dies":
                os._exit(1)
            raise ValueError("the second layer is out of order")

    if rank == culprit:
        model.model.layers[1].mlp.register_forward_pre_hook(fail)
    seen: dict[str, Any] = {"errors": [], "seconds": []}
    for _ in range(2):
        began = time.monotonic()
        try:
            model.generate_batch(PROMPTS, greedy())
        except Exception as error:
            seen["errors"].append(f"{type(error).__name__}: {error}")
        seen["seconds"].append(time.monotonic() - began)
    return seen


def dies_while_others_wait(rank: int, folder: str) -> bool:
    """Rank 0 starts a manager, and dies with it."""
    manager = load(folder).init_continuous_batching()
    manager.start()
    if rank == 0:
        time.sleep(0.5)  # the other is waiting by now
        os._exit(1)
    manager.stop(block=True)
    return isinstance(manager.background_thread_status.fatal_error, RankError)


def alone(rank: int, folder: str) -> str:
    """Rank 0 makes a call that nobody else makes."""
    model = load(folder)
    team.LATE_S = 1.0
    if rank == 1:
        return ""
    try:
        model.generate_batch(PROMPTS, greedy())
    except RankError as error:
        return str(error)
    return "?"


def out_of_step(rank: int, folder: str) -> str:
    """The ranks make different calls."""
    model = load(folder)
    try:
        if rank == 0:
            return str(len(model.generate_batch(PROMPTS, greedy())))
        return hf_cb.explain(model).path
    except RankError as error:
        return str(error)
