"""Answers 20 questions at once with the demo model, then compares the speed with plain `model.generate`.

usage: python demos/batch.py [--max-new-tokens 96] [--dtype bfloat16] [--rounds 3]

The other side is one left-padded batch of the same chats with the same options, on the model as loaded.
Both count tokens up to the end of each answer, and run a short request before the clock starts. The best of a
few rounds counts. Beside other programs threads wait for each other, which can slow either side several times, so
the ratio says so when other programs kept the processor busy.
"""

import argparse
import shutil
import sys
import textwrap
import time

import psutil
import torch
from transformers import GenerationConfig

import hf_cb

PATIENCE_S = 60.0  # after which no other round of generate() begins
# It also makes the answer about Paris safe in bfloat16: without it, "The" leads "L'" by a rounding error.
SYSTEM = "Answer in one short paragraph."
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "What is 12 times 12?",
    "Who wrote Romeo and Juliet?",
    "Explain photosynthesis to a child.",
    "Name three uses of copper.",
    "How do I boil an egg?",
    "What does a compiler do?",
    "Translate 'good morning' to Spanish.",
    "What causes the seasons?",
    "Give me a tip for sleeping better.",
    "What is the largest planet of the solar system?",
    "Why do cats purr?",
    "Write a Python function that reverses a string.",
    "What is the difference between a list and a tuple in Python?",
    "Suggest a name for a small bakery.",
    "How many legs does a spider have?",
    "What is inflation in economics?",
    "Tell me a short story about a lighthouse.",
)


def main() -> int:
    """Run the demo; the exit status is 1 when the model gets the capital of France wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    model, tokenizer = hf_cb.demo_model(dtype=getattr(torch, options.dtype))
    system = {"role": "system", "content": SYSTEM}
    chats = [[system, {"role": "user", "content": question}] for question in QUESTIONS]
    config = GenerationConfig(max_new_tokens=options.max_new_tokens, do_sample=False)

    model = hf_cb.accelerate(model, tokenizer)
    start = time.perf_counter()
    model.generate_batch(chats[:1], generation_config=GenerationConfig(max_new_tokens=2, do_sample=False))
    ready_s = time.perf_counter() - start

    others = OtherPrograms()
    batch_s = []
    for turn in range(options.rounds):
        start = time.perf_counter()
        outputs = model.generate_batch(chats, generation_config=config, progress_bar=turn == 0)
        batch_s.append(time.perf_counter() - start)
        if turn == 0:
            results = list(outputs.values())
            for question, result in zip(QUESTIONS, results, strict=True):
                print_answer(question, result)

    hf_cb.restore(model)
    print(f"\ncomparing with generate(), {options.rounds} times, or fewer if it takes long:", flush=True)
    plain_tokens, plain_s = plain_generate(model, tokenizer, chats, options)
    busy, cores = others.cores_used(), psutil.cpu_count() or 1

    print(f"\n{len(chats)} requests, {options.dtype}, {model.device}, {torch.get_num_threads()} threads")
    batch_tokens = sum(len(result.generated_tokens) for result in results)
    batch_rate = print_rate("hf_cb, generate_batch", batch_tokens, batch_s)
    plain_rate = print_rate("transformers, generate", plain_tokens, plain_s)
    doubt = f" (unreliable: other programs kept {busy:.1f} of {cores} cores busy)" if busy > 0.1 * cores else ""
    print(f"  ratio {batch_rate / plain_rate:.2f}{doubt}")
    print(f"  before it, once a model: {ready_s:.1f} s of checks and warm-up")

    print("  (one full batch of short chats is generate's best case; `hf-cb bench` mixes long and short)")
    capital = results[0].text or ""
    if "Paris" not in capital:
        print(f"the capital of France should be Paris, and the answer was {capital!r}", file=sys.stderr)
        return 1
    return 0


class OtherPrograms:
    """How many cores all programs but this one have kept busy since it was made."""

    def __init__(self) -> None:
        self.start = self._times()

    def cores_used(self) -> float:
        """The mean number of cores since the start."""
        wall, others = (now - then for now, then in zip(self._times(), self.start, strict=True))
        return others / wall

    @staticmethod
    def _times() -> tuple[float, float]:
        system, own = psutil.cpu_times(), psutil.Process().cpu_times()
        busy = system.user + system.system + getattr(system, "nice", 0.0)
        return time.perf_counter(), busy - own.user - own.system


def print_answer(question: str, result) -> None:
    """A question, when its first token came, and its answer cut to the terminal."""
    width = shutil.get_terminal_size((100, 24)).columns
    answer = " ".join((result.text or str(result.error)).split())
    print(f"\n{question}  [first token {result.metrics.ttft_s:.2f} s, {result.finish_reason}]")
    lines = textwrap.wrap(answer, width - 4, max_lines=2, placeholder=" ...")
    print(textwrap.indent("\n".join(lines), "    "))


def print_rate(name: str, tokens: int, seconds: list[float]) -> float:
    """One line of the comparison; returns tokens per second."""
    rate = tokens / min(seconds)
    print(f"  {name:24}{tokens:6} tokens in {min(seconds):.1f} to {max(seconds):.1f} s: {rate:7.1f} tokens/s")
    return rate


def plain_generate(model, tokenizer, chats, options) -> tuple[int, list[float]]:
    """The same work without hf_cb: one left-padded batch. Returns tokens and the seconds of each round."""
    tokenizer.padding_side = "left"

    def run(chats, max_new_tokens: int) -> list[list[int]]:
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return out[:, inputs["input_ids"].shape[1] :].tolist()

    run(chats[:1], 2)
    seconds = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        rows = run(chats, options.max_new_tokens)
        seconds.append(time.perf_counter() - start)
        print(f"  {seconds[-1]:.1f} s", flush=True)
        if sum(seconds) > PATIENCE_S:
            break
    eos = model.generation_config.eos_token_id
    stops = set(eos) if isinstance(eos, list) else {eos}
    # a row counts up to its end-of-sequence token; what follows is padding
    ends = (next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in rows)
    return sum(ends), seconds


if __name__ == "__main__":
    sys.exit(main())
