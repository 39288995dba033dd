"""Tools that call `model.generate`, with and without hf_cb: transformers' text-generation pipeline, and
lm-evaluation-harness on a local task. Are the outputs the same in float32, and how much faster is bfloat16?

    python -m hf_cb.bench.faces [--model FOLDER] [--faces pipeline,harness] [--rounds 3]

The harness is `pip install lm_eval`; its part is left out where that is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_cb.bench.workload import mixed
from hf_cb.demo import demo_model_path
from hf_cb.patching import accelerate, restore

BATCH_SIZE = 16
TASK = "hf_cb_faces"

Face = Callable[[Any, Any, list[str], int], list[str]]  # model, tokenizer, prompts, most new tokens -> outputs


def run_pipeline(model: Any, tokenizer: Any, prompts: list[str], max_new: int) -> list[str]:
    """The outputs of `pipeline("text-generation")` in batches."""
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = dict(batch_size=BATCH_SIZE, max_new_tokens=max_new, do_sample=False, return_full_text=False)
    return [found[0]["generated_text"] for found in pipe(prompts, **options)]


def run_harness(model: Any, tokenizer: Any, prompts: list[str], max_new: int) -> list[str]:
    """The outputs of lm-evaluation-harness's HF backend: `generate_until` on a task of these prompts, in batches."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        _write_task(Path(folder), prompts, max_new)
        found = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH_SIZE),
            tasks=[TASK],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples]


def _write_task(folder: Path, prompts: list[str], max_new: int) -> None:
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n\n"], "do_sample": False, "max_gen_toks": max_new},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task))  # JSON is YAML


FACES: dict[str, Face] = {"pipeline": run_pipeline, "harness": run_harness}


def compare(face: Face, model: Any, tokenizer: Any, prompts: list[str], max_new: int) -> tuple[int, float, float]:
    """How many outputs are the same, and the seconds of the plain and of the accelerated model."""
    plain, before = _timed(face, model, tokenizer, prompts, max_new)
    with accelerated(model):
        face(model, tokenizer, prompts[:2], 2)  # a first call prepares the model
        ours, after = _timed(face, model, tokenizer, prompts, max_new)
    return sum(a == b for a, b in zip(plain, ours, strict=True)), before, after


@contextmanager
def accelerated(model: Any) -> Iterator[None]:
    accelerate(model)
    try:
        yield
    finally:
        restore(model)


def _timed(face: Face, *arguments: Any) -> tuple[list[str], float]:
    began = time.perf_counter()
    outputs = face(*arguments)
    return outputs, time.perf_counter() - began


def mixed_texts(tokenizer: Any, count: int) -> list[str]:
    """Prompts of mixed lengths, as text."""
    return [tokenizer.decode(request.prompt) for request in mixed(tokenizer, n=count).requests]


def load(folder: str, dtype: torch.dtype) -> tuple[Any, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), tokenizer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hf_cb.bench.faces", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder (default: the demo model)")
    parser.add_argument("--faces", default=",".join(FACES), help="of %(default)s")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-new", type=int, default=128, help="tokens of an output, at most (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison of speed (default: %(default)s)")
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    folder, same = args.model or str(demo_model_path()), True
    for name in args.faces.split(","):
        if name == "harness" and importlib.util.find_spec("lm_eval") is None:
            print("harness: lm_eval is not installed", file=sys.stderr)
            continue
        model, tokenizer = load(folder, torch.float32)
        prompts = mixed_texts(tokenizer, args.prompts)
        equal, _, _ = compare(FACES[name], model, tokenizer, prompts, args.max_new)
        same &= equal == len(prompts)
        print(f"{name}, float32: {equal} of {len(prompts)} outputs are the same", flush=True)
        model, tokenizer = load(folder, torch.bfloat16)
        ratios = []
        for _ in range(args.rounds):
            _, before, after = compare(FACES[name], model, tokenizer, prompts, args.max_new)
            ratios.append(before / after)
            print(f"{name}, bfloat16: {before:.1f} s plain, {after:.1f} s with hf_cb", flush=True)
        if ratios:
            print(
                f"{name}, bfloat16: {statistics.median(ratios):.2f} times as fast (median of {len(ratios)})", flush=True
            )
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
