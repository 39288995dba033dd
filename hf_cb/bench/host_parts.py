"""What stands in for a model where the host is measured: a device that says the same token for every row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_cb.core import SamplingParams
from hf_cb.engine.device_sampler import DeviceSampler
from hf_cb.engine.sampler import Drawing, Sampled
from hf_cb.engine.simulation import NoModel, SimulatedClock
from hf_cb.models.drawing import Settings
from hf_cb.models.groups import LayerGroup
from hf_cb.models.recorded.fixed_inputs import FixedInputs
from hf_cb.models.sending import to_device
from hf_cb.steps import Drawn, PlanPart, StepBatch
from hf_cb.text.stop_strings import StopStrings
from hf_cb.warpers import Warpers

VOCAB, TOKEN = 256, 97
PAGE = 16
KINDS = ("greedy", "no prefix cache", "two groups", "sampled", "logprobs", "stop strings", "mixed")


class NoForward(NoModel):
    """Takes a step's numbers as a model on a GPU does; its device is busy with each for `device_s` seconds."""

    overlaps = True

    def __init__(self, two_groups: bool, rows: int, longest: int, device_s: float) -> None:
        super().__init__(SimulatedClock(), lambda rows, tokens: 0.0)
        if two_groups:
            self.groups = [*self.groups, LayerGroup(layers=(1,), storages=(0,), window=1024)]
        self._inputs = FixedInputs(rows, len(self.groups), -(-longest // PAGE), PAGE, self.device)
        self._device_s = device_s
        self.ready = 0.0  # when the device is done with all that it was told
        self._logits = torch.zeros(1, VOCAB).index_fill(1, torch.tensor([TOKEN]), 1.0)

    def forward(self, batch: StepBatch) -> Any:
        rows = len(batch.logits_rows)
        if rows == len(batch.input_ids):
            self._inputs.fill(batch, rows)
        else:
            to_device(batch, self.device)
        self.ready = max(time.perf_counter(), self.ready) + self._device_s
        logits = self._logits.expand(rows, VOCAB)
        return logits if batch.draws is None else draw(logits)


def draw(logits: Tensor, settings: Settings | None = None) -> Drawn:
    """In place of the kernel that does so."""
    return Drawn(torch.full((len(logits),), TOKEN), torch.zeros(len(logits)))


class TimedSampler(DeviceSampler):
    """Where steps overlap, a record's `sample_s` has the commit of the step before in it."""

    def __init__(self, clock: Callable[[], float], runner: NoForward) -> None:
        super().__init__(draw)
        self._clock, self._runner = clock, runner
        self.seconds = 0.0

    def sample(self, logits: Tensor | Drawn, parts: Sequence[PlanPart]) -> list[list[Sampled]] | Drawing:
        began = self._clock()
        drawing = super().sample(logits, parts)
        self.seconds = self._clock() - began
        assert isinstance(drawing, Drawing)
        return Drawing(drawing.tokens, partial(self._read, drawing, self._runner.ready))

    def _read(self, drawing: Drawing, ready: float) -> list[list[Sampled]]:
        if (left := ready - time.perf_counter()) > 0:
            time.sleep(left)
        return drawing.read()


def params_of(kind: str) -> SamplingParams:
    """What requests of a kind of step ask for; of most kinds it is a token."""
    params = SamplingParams(10**6, eos_token_ids=frozenset([0]))
    if kind == "sampled":
        return replace(params, do_sample=True, process=lambda ids, scores: scores, warpers=Warpers(0.8, 50, 0.95))
    if kind == "stop strings":
        return replace(params, stop_checks=(StopStrings(byte_tokenizer(), ["\n\nQ:", "<|stop|>"]),))
    return replace(params, logprobs=True) if kind == "logprobs" else params


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    whole = Tokenizer(models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=whole)
