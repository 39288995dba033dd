"""The calls on a model: many prompts in, all results out, as a dict, as a stream of deltas, or one by one."""

from __future__ import annotations

import queue
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_cb.config import EngineConfig
from hf_cb.core import Delta, GenerationOutput
from hf_cb.errors import OptionError, PromptError
from hf_cb.manager.handle import Handle, Reader
from hf_cb.manager.kept import kept_manager
from hf_cb.manager.manager import ContinuousBatchingManager
from hf_cb.manager.session import complete, open_manager
from hf_cb.metrics.stats import ManagerStats
from hf_cb.models.plan import Need, model_length
from hf_cb.options.recipe import Recipe, make_recipe
from hf_cb.seeds import seed_sequence
from hf_cb.text.prompts import iter_encoded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Batch:
    """What a call on a model was given, besides the model: prompts, and everything that steers them."""

    model: PreTrainedModel
    inputs: Any
    generation_config: Any = None  # one for all, or a sequence with one for each input
    config: EngineConfig = field(default_factory=EngineConfig)
    tokenizer: PreTrainedTokenizerBase | None = None
    attention_mask: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    persistent: bool = False

    def __post_init__(self) -> None:
        manager = kept_manager(self.model)
        if manager is not None and self.config == EngineConfig():
            self.config = manager.config  # it runs with these

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len or model_length(self.model)

    def check(self) -> None:
        """Raises OptionError now rather than when the first prompt is reached."""
        next(self.recipes(), None)

    def encoded(self) -> Iterator[list[int] | Exception]:
        """The prompts as ids, lazily; a bad one is the exception that says so."""
        return iter_encoded(
            self.inputs,
            self.tokenizer,
            attention_mask=self.attention_mask,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def recipes(self) -> Iterator[Recipe]:
        """Each prompt's options, merged and checked; without end if one config is for all."""
        per_input = isinstance(self.generation_config, Sequence)
        seeds = seed_sequence(self.config.seed)
        for config in self.generation_config if per_input else [self.generation_config]:
            recipe = make_recipe(
                self.model,
                config,
                self.options,
                tokenizer=self.tokenizer,
                default_length=self.max_model_len,
                logprobs=self.config.return_logprobs,
                seeds=seeds,
            )
            yield recipe
            while not per_input:
                yield recipe


def generate_batch(
    batch: Batch, *, record_timestamps: bool = False, progress_bar: bool = False
) -> dict[str, GenerationOutput]:
    """All results by request id, in the order of the inputs; a prompt's further sequences follow its first."""
    prompts = list(batch.encoded())
    recipes = list(_pair(prompts, batch.recipes()))
    if not prompts:
        return {}
    need = _need(recipes, batch.max_model_len)
    outputs: list[GenerationOutput] = []
    with _session(batch, need) as session:
        before = session.manager.stats()
        submitted = [session.submit(prompt, recipe, i) for i, (prompt, recipe) in enumerate(recipes)]
        handles = [item for item in submitted if isinstance(item, Handle)]
        session.complete()
        if progress_bar:
            _show_progress(session.manager, handles, before)
        for item in submitted:
            outputs += item.outputs() if isinstance(item, Handle) else [item]
        if session.manager.loop.fatal_error is not None:
            session.manager.loop.refuse_if_stopped()
    for output in outputs:
        output.timestamps = output.timestamps if record_timestamps else None
    return {output.request_id: output for output in outputs}


def stream_batch(batch: Batch) -> Generator[Delta]:
    """Tokens of all requests as they come. A sequence's last delta has its finish_reason and, if it failed, error."""
    batch.check()
    return _stream(batch)


def _stream(batch: Batch) -> Generator[Delta]:
    with _session(batch) as session:
        readers: dict[Handle, Reader] = {}
        for item in session.news():
            if isinstance(item, GenerationOutput):
                yield Delta(item.request_id, item.index, [], "", item.finish_reason, item.error)
                continue
            reader = readers.get(item) or readers.setdefault(item, Reader(item))
            yield from reader.read()
            if reader.at_end:
                session.done(item)
                del readers[item]


def iterate_batch(batch: Batch) -> Generator[GenerationOutput]:
    """Whole results as each finishes. Inputs are read only as fast as they are needed."""
    batch.check()
    return _iterate(batch)


def _iterate(batch: Batch) -> Generator[GenerationOutput]:
    with _session(batch) as session:
        for item in session.news():
            if isinstance(item, GenerationOutput):
                yield item
            elif item.done:
                session.done(item)
                yield from item.outputs()


class _Session:
    """One call's requests on a manager."""

    def __init__(self, manager: ContinuousBatchingManager, batch: Batch, stack: ExitStack) -> None:
        self.manager = manager
        self.batch = batch
        self.live: set[Handle] = set()
        self._stack = stack  # is closed with the call

    def submit(self, prompt: list[int] | Exception, recipe: Recipe, index: int) -> Handle | GenerationOutput:
        """A handle; or, for a bad prompt, its result."""
        if isinstance(prompt, list):
            try:
                handle = self.manager.submit_ids(prompt, recipe, index=index, bounded=False)
            except PromptError as error:
                prompt = error
            else:
                self.live.add(handle)
                return handle
        return GenerationOutput(
            request_id=self.manager.registry.next_id(),
            error=f"{type(prompt).__name__}: {prompt}",
            status=RequestStatus.FAILED,
            finish_reason="error",
            exception=prompt,
            index=index,
        )

    def complete(self) -> None:
        """All that the call has is submitted."""
        self._stack.enter_context(complete(self.manager))

    def done(self, handle: Handle) -> None:
        self.live.discard(handle)

    def news(self) -> Iterator[Handle | GenerationOutput]:
        """Handles as something happens to them, and the results of bad prompts. Keeps twice as many requests in hand as
        a step takes, so that the inputs may be endless; while the inputs make it wait, nothing is reported."""
        changed: queue.SimpleQueue[Handle] = queue.SimpleQueue()
        source = enumerate(_pair(self.batch.encoded(), self.batch.recipes()))
        limit = 2 * self.manager.engine.config.max_num_seqs
        exhausted = False
        while self.live or not exhausted:
            if not exhausted and len(self.live) < limit:
                index, (prompt, recipe) = next(source, (-1, (None, None)))
                if prompt is None or recipe is None:
                    exhausted = True
                    self.complete()
                    continue
                item = self.submit(prompt, recipe, index)
                if isinstance(item, Handle):
                    item.mailbox.add_waker((None, partial(changed.put, item)))
                    changed.put(item)  # for what happened before the waker was there
                else:
                    yield item
            reading = not exhausted and len(self.live) < limit
            while self.live and not (reading and changed.empty()):
                if changed.empty():
                    self.manager.loop.check_may_wait()
                item = changed.get()
                if item in self.live:
                    yield item
                reading = not exhausted and len(self.live) < limit


@contextmanager
def _session(batch: Batch, need: Need | None = None) -> Iterator[_Session]:
    """A manager for one call. Leaving early (an exception, Ctrl-C, a closed generator) cancels what is left."""
    opened = open_manager(batch.model, batch.config, batch.tokenizer, batch.persistent, need)
    with opened as manager, ExitStack() as stack:
        session = _Session(manager, batch, stack)
        try:
            yield session
        finally:
            for handle in session.live:  # as if they were gone: cancel() takes a lock (see `_close` in `session`)
                if (guard := handle.mailbox.guard) is not None:
                    manager.loop.dropped.append(guard)


def _pair(prompts: Iterable[Any], recipes: Iterator[Recipe]) -> Iterator[tuple[Any, Recipe]]:
    count = 0
    for count, prompt in enumerate(prompts, start=1):
        recipe = next(recipes, None)
        if recipe is None:
            raise OptionError(f"generation_config has {count - 1} entries and the inputs have more: give one for each.")
        yield prompt, recipe


def _need(recipes: list[tuple[Any, Recipe]], max_model_len: int) -> Need:
    tokens = seqs = 0
    for prompt, recipe in recipes:
        if isinstance(prompt, list):
            tokens += min(max_model_len, len(prompt) + recipe.longest_output(len(prompt))) * recipe.num_return_sequences
            seqs += recipe.num_return_sequences
    return Need(max(1, tokens), max(1, seqs))


def _show_progress(manager: ContinuousBatchingManager, handles: list[Handle], before: ManagerStats) -> None:
    """A bar of finished sequences with the tokens per second so far; returns when all are done."""
    total = sum(h.num_sequences for h in handles)
    with tqdm(total=total, desc=f"Generating for {total} requests", unit="req") as bar:
        for handle in handles:
            while not handle.wait(0.2):
                _update_bar(bar, manager, before)
        _update_bar(bar, manager, before)


def _update_bar(bar: Any, manager: ContinuousBatchingManager, before: ManagerStats) -> None:
    now = manager.stats()
    tokens, seconds = now.tokens - before.tokens, bar.format_dict["elapsed"]
    bar.set_postfix_str(f"{tokens / max(seconds, 1e-9):.0f} tok/s", refresh=False)
    bar.update(now.finished - before.finished - bar.n)
