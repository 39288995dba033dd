"""From a line of a job to its record. Records have nothing in them that another run would say differently."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_cb.cli.job_lines import Line, Task, read_task
from hf_cb.cli.model import served_name
from hf_cb.core import GenerationOutput
from hf_cb.errors import ManagerStoppedError, OptionError, describe
from hf_cb.seeds import derive_seed
from hf_cb.serving.errors import as_api_error
from hf_cb.serving.intake import Intake, Submission
from hf_cb.text.prompts import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_cb.manager.handle import Handle
    from hf_cb.manager.manager import ContinuousBatchingManager


@dataclass
class Work:
    """A line that is being answered. `record` may be called once all of its handles are done."""

    line: Line
    record: Callable[[], dict[str, Any]]
    handles: Sequence[Handle] = field(default_factory=list)

    def tell_when_done(self, tell: Callable[[], None]) -> None:
        """`tell` is called at least once after all handles are done, by any thread."""

        def tell_if_done() -> None:
            if all(handle.done for handle in self.handles):
                tell()

        for handle in self.handles:
            handle.mailbox.add_waker((None, tell_if_done))
        tell_if_done()  # for what happened before the wakers were there

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()


class Answerer:
    """Starts the work on lines.

    Args:
        options: generation options for lines that do not say them; not for OpenAI's requests, which say all of it.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        tokenizer: PreTrainedTokenizerBase,
        args: argparse.Namespace,
        options: Mapping[str, Any],
    ) -> None:
        self.manager, self.tokenizer = manager, tokenizer
        self.options = dict(options)
        self.seed = args.seed or 0
        self.system, self.token_ids = args.system, args.token_ids
        has_template = bool(getattr(tokenizer, "chat_template", None))
        self.as_chat = has_template if args.chat is None else args.chat
        if args.chat and not has_template:
            raise OptionError("--chat needs a chat template, and this model's tokenizer has none: use --no-chat.")
        if args.system is not None and not self.as_chat:
            raise OptionError("--system is for chats, and these prompts are plain text: leave it out.")
        self.intake = Intake(manager, tokenizer, served_name(args.model))

    def start(self, line: Line) -> Work:
        """Submits a line; one that is refused has a record already. Raises ManagerStoppedError alone."""
        task = Task({})
        try:
            task = read_task(line)
            if task.body is not None:
                return self._start_openai(line, task, task.body)
            return self._start(line, task)
        except ManagerStoppedError:
            raise
        except Exception as error:  # about this line alone
            refusal = error
            return Work(line, lambda: _failure(task, refusal))

    def _seed_of(self, line: Line) -> int:
        return derive_seed(self.seed, line.index)

    def _start(self, line: Line, task: Task) -> Work:
        given = dict(task.options or {})
        template = given.pop("chat_template_kwargs", None)
        options = {"seed": self._seed_of(line)} | self.options
        if given.get("do_sample") is False:  # then nothing of the command's sampling belongs to it
            options = {k: v for k, v in options.items() if k not in ("temperature", "top_p", "top_k")}
        if given.get("max_length") is not None:
            options.pop("max_new_tokens")
        options |= given
        prompt = encode_prompt(self._prompt(task.prompt), self.tokenizer, chat_template_kwargs=template)
        handle = self.manager.submit(prompt, request_id=f"line-{line.index}", queue_wait=float("inf"), **options)
        return Work(line, lambda: self._record(task, handle.outputs(0), options), [handle])

    def _prompt(self, prompt: Any) -> Any:
        """A text as a chat, where that is wanted."""
        if not isinstance(prompt, str) or not self.as_chat:
            return prompt
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": prompt}]

    def _start_openai(self, line: Line, task: Task, body: dict[str, Any]) -> Work:
        request = self.intake.read(body, task.is_chat)
        head = {"id": f"{'chatcmpl' if task.is_chat else 'cmpl'}-line-{line.index}", "created": 0}
        submission = self.intake.submit(request, f"line-{line.index}", head, self._seed_of(line))
        return Work(line, lambda: _openai_record(task, submission), submission.handles)

    def _record(self, task: Task, outputs: Sequence[GenerationOutput], options: Mapping[str, Any]) -> dict[str, Any]:
        """With several sequences, what differs between them is a list."""
        for output in outputs:
            if output.error is not None:
                return _failure(task, output.exception or RuntimeError(output.error))
        fields: dict[str, list[Any]] = {
            "text": [o.text for o in outputs],
            "finish_reason": [o.finish_reason for o in outputs],
            "completion_tokens": [len(o.generated_tokens) for o in outputs],
        }
        if self.token_ids:
            fields["token_ids"] = [o.generated_tokens for o in outputs]
        if options.get("logprobs"):
            fields["logprobs"] = [o.logprobs for o in outputs]
            fields["top_logprobs"] = [o.top_logprobs for o in outputs]
        if options.get("prompt_logprobs"):
            fields["prompt_logprobs"] = [o.prompt_logprobs for o in outputs]
        several = len(outputs) > 1
        own = {key: values if several else values[0] for key, values in fields.items()}
        return task.name | own | {"prompt_tokens": len(outputs[0].prompt_ids), "error": None}


def _failure(task: Task, error: Exception) -> dict[str, Any]:
    if task.body is not None:
        found = as_api_error(error)
        response = {"status_code": found.status, "body": found.body()}
        return task.name | {"response": response, "error": found.body()["error"]}
    return task.name | {"text": None, "finish_reason": "error", "error": describe(error)}


def _openai_record(task: Task, submission: Submission) -> dict[str, Any]:
    """As in OpenAI's batch files, but that times and what the cache held are left out."""
    try:
        for handle in submission.handles:
            handle.results(0)
        body = submission.whole()
    except Exception as error:
        return _failure(task, error)
    del body["usage"]["prompt_tokens_details"]
    return task.name | {"response": {"status_code": 200, "body": body}, "error": None}
