"""The face of continuous batching: requests in, handles and outputs out. The thread behind it is in `loop`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_cb.attention import interception
from hf_cb.config import EngineConfig
from hf_cb.core import Request, Status, Update
from hf_cb.engine.limits import check_ids
from hf_cb.manager import kept
from hf_cb.manager.build import build_engine
from hf_cb.manager.compat import TransformersCalls
from hf_cb.manager.handle import Handle
from hf_cb.manager.loop import EngineLoop
from hf_cb.manager.mailbox import Mailbox
from hf_cb.manager.openmp import release_idle_workers
from hf_cb.manager.recording import Recordable, recording
from hf_cb.manager.registry import Registry
from hf_cb.manager.router import Router
from hf_cb.manager.showing import Showing
from hf_cb.manager.submission import make_requests
from hf_cb.metrics.counts import Metrics
from hf_cb.models.plan import Need
from hf_cb.options.recipe import Recipe, make_recipe
from hf_cb.seeds import seed_sequence
from hf_cb.text.prompts import encode_prompt

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


class ContinuousBatchingManager(Showing, TransformersCalls, Recordable):
    """Generates for requests that come and go; made by `init_continuous_batching` and its like, not by hand.

    Args:
        model: a loaded transformers model.
        generation_config: what requests without a config of their own use; the model's if None.
        config: the engine's options.
        tokenizer: for prompts that are text or chats, and for text in results.
        need: all the work that will come, if that is known; bounds the KV cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        config: EngineConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        need: Need | None = None,
    ) -> None:
        self.model = model
        self.generation_config = generation_config
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        with interception.installed():
            self.engine = build_engine(model, self.config, need)
        self.router = Router()
        num_threads = self.config.num_threads or torch.get_num_threads()
        times = (self.config.switch_interval, self.config.train_mode_timeout)
        self.loop = EngineLoop(self.engine, model, self._deliver, self._cancel, num_threads, *times)
        self._vocab_size = model.get_input_embeddings().weight.shape[0]
        self._seeds = seed_sequence(self.config.seed)
        self.registry = Registry(self.config.max_queue_size)
        self.metrics = Metrics()
        self.on_end: Callable[[], None] | None = None  # called in the loop's thread each time that it ends

    # ----------------------------------------------------------------------------------------------------- submitting

    def submit(
        self,
        prompt: Any,
        generation_config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str | None = None,
        deadline: float | None = None,
        queue_wait: float | None = None,
        max_queue_time: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        index: int = 0,
        **generation_kwargs: Any,
    ) -> Handle:
        """Adds a request and returns its handle at once.

        Args:
            prompt: text, a chat, token ids, or what a tokenizer returns for one prompt.
            generation_config: as for `model.generate`.
            request_id: `req_N` if None.
            priority: for the policy "priority": smaller is more important (vLLM's meaning).
            user: for the policy "fair": whose request it is.
            deadline: seconds from now after which the request ends with "timeout".
            queue_wait: seconds that this call may wait for room if `max_queue_size` is reached.
            max_queue_time: seconds after which a request that has not started ends with "timeout". If None, both are
                the config's.
            **generation_kwargs: any field of it, for this request, and options of our own such as `seed`, which makes
                sampling repeatable: see docs/sampling.md.

        The request lives as long as somebody holds its handle, or iterates over it: dropping that cancels it.

        Raises:
            PromptError, OptionError, TypeError, ValueError: about this request; nothing was added.
            ManagerStoppedError: the manager is dead or stopping. QueueFullError: `max_queue_size` is reached.
        """
        tokenizer = tokenizer or self.tokenizer
        prompt_ids = encode_prompt(prompt, tokenizer, chat_template_kwargs=chat_template_kwargs)
        recipe = self.recipe(generation_config, generation_kwargs, tokenizer)
        wait = self.config.queue_wait if queue_wait is None else queue_wait
        own: dict[str, Any] = {
            "request_id": request_id,
            "priority": priority,
            "user": user,
            "deadline": deadline,
            "max_queue_time": max_queue_time,
        }
        return self.submit_ids(prompt_ids, recipe, index=index, queue_wait=wait, **own)

    def recipe(
        self,
        generation_config: GenerationConfig | None,
        options: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Recipe:
        """A request's options, merged with this manager's and the model's; OptionError names a bad one."""
        return make_recipe(
            self.model,
            generation_config if generation_config is not None else self.generation_config,
            options,
            tokenizer=tokenizer or self.tokenizer,
            default_length=self.engine.config.max_model_len,
            logprobs=self.config.return_logprobs,
            seeds=self._seeds,
        )

    def submit_ids(
        self,
        prompt_ids: list[int],
        recipe: Recipe,
        *,
        index: int = 0,
        bounded: bool = True,
        queue_wait: float = 0.0,
        **options: Any,
    ) -> Handle:
        """`submit` for a prompt and options that are resolved already; `bounded=False` disregards `max_queue_size`."""
        requests = self._make_requests(prompt_ids, recipe, **options)
        mailbox = Mailbox(requests, index)
        cancel, dropped = partial(self._post_cancel, requests), self.loop.dropped.append
        # made first: if an interrupt comes before it is returned, it goes, and its requests with it
        handle = Handle(mailbox, cancel, dropped, self.loop.check_may_wait, self._why, recipe.rendering)
        self._enqueue(requests, mailbox, bounded=bounded, queue_wait=queue_wait)
        return handle

    def _make_requests(
        self, prompt_ids: list[int], recipe: Recipe, request_id: str | None = None, **options: Any
    ) -> list[Request]:
        check_ids(prompt_ids, self._vocab_size)
        options["request_id"] = request_id
        return make_requests(prompt_ids, recipe, self.engine, self.registry.next_id, self.config, **options)

    def _enqueue(
        self,
        requests: list[Request],
        mailbox: Mailbox | None,
        streaming: bool = False,
        bounded: bool = True,
        queue_wait: float = 0.0,
    ) -> None:
        self.loop.refuse_if_stopped()
        release_idle_workers()  # whoever submits is about to wait
        entering = self.registry.entering(requests, bounded, queue_wait, self.loop.check_may_wait)
        with recording(self.recorder, requests), entering:
            try:
                for request in requests:
                    self.router.attach(request, mailbox, streaming)
                self.loop.post_work(lambda: self._admit(requests))
            except BaseException:
                for request in requests:
                    self.router.detach(request)
                raise

    # -------------------------------------------------------------------------------------------------------- control

    def is_running(self) -> bool:
        return self.loop.is_running

    def start(self) -> None:
        """Starts the thread; the model is put in `eval()` while it runs."""
        self.router.queue.reopen()
        self.loop.start(self._deliver, self._cancel)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Ends the thread once all requests are done, or at once (`hard_stop`; they end with an error). With
        `keep_for_next_session` the model's next session gets this manager, with its prefix cache."""
        if block:
            self.loop.check_may_join()
        self.loop.stop(hard=hard_stop)
        if keep_for_next_session:
            kept.keep(self.model, self)
        if block:
            self.loop.join(timeout)

    def destroy(self) -> None:
        """Stops for good, once all requests are done; one that was never started drops what waits for it."""
        self.loop.check_may_join()
        self.loop.stop(destroy=True)
        self.loop.join()

    def pause(self) -> AbstractContextManager[None]:
        """Inside, no step runs, so the weights may be changed; requests go on afterwards with the KV they have.

        Raises:
            RuntimeError: the manager is not running.
        """
        return self.loop.pause()

    def reset_prefix_cache(self) -> None:
        """Forgets what prompts have in common: needed after writes through `.data` outside a pause."""
        if self.loop.is_running:
            self.loop.post(self.engine.weights_written)
        else:
            self.engine.weights_written()

    def _post_cancel(self, requests: list[Request]) -> None:
        with self.registry.cancelling(requests) as untold:
            if untold:
                self.loop.post(lambda: self._cancel(requests))

    # --------------------------------------------------------------------------------------------- by the loop's thread

    def _admit(self, requests: list[Request]) -> None:
        for request in self.registry.known(requests):  # others' submission was interrupted
            try:
                self.engine.admit(request)
            except Exception as error:  # it ends that request, and not the loop
                request.status, request.finish_reason, request.exception = Status.FINISHED, "error", error
                self._deliver([Update(request, [])], None)

    def _cancel(self, requests: list[Request]) -> None:
        updates = [u for r in self.registry.known(requests) if (u := self.engine.cancel(r)) is not None]
        if updates:
            self._deliver(updates, None)

    def _deliver(self, updates: list[Update], error: BaseException | None) -> None:
        if error is not None:  # the loop has ended: so has every request, also one that it has not seen yet
            updates = [Update(request, []) for request in self.router.live()]
            for update in updates:
                update.request.status = Status.FINISHED
        self.registry.leave(updates, everybody=error is not None)
        self.metrics.count(updates, died=error is not None)
        if self.recorder is not None:
            self.recorder.ended(updates)
        self.router.deliver(updates, error)
        if error is not None:
            self.router.queue.close()
            if self.on_end is not None:
                self.on_end()
