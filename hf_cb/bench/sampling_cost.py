"""What sampling costs of a step: many decoding requests with the same options, against greedy ones.

usage: python -m hf_cb.bench.sampling_cost [--requests 64] [--tokens 48] [--rounds 5] [--threads N] [--only NAME ...]

The kinds take turns, and medians over the decode steps of all rounds are shown, since a machine's speed moves. `of a
step`: sampling and commit (where stop strings are looked for) beyond greedy's, as a share of that kind's step.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import median
from typing import Any

import torch

from hf_cb.demo import demo_model
from hf_cb.patching import accelerate, restore
from hf_cb.steps import StepRecord

NUCLEUS = dict(do_sample=True, temperature=0.8, top_k=0, top_p=0.95)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature + top-p": NUCLEUS,
    "temperature + top-k": dict(do_sample=True, temperature=0.8, top_k=50),
    "repetition penalty": dict(repetition_penalty=1.1),
    "repetition penalty + top-p": NUCLEUS | dict(repetition_penalty=1.1),
    "presence + frequency + bias": dict(presence_penalty=0.5, frequency_penalty=0.2, logit_bias={42: -100.0}),
    "stop strings": dict(stop_strings=["\n\nQ:", "<|stop|>"]),
    "repetition penalty + stop strings": dict(repetition_penalty=1.1, stop_strings=["\n\nQ:", "<|stop|>"]),
    "min length": dict(min_new_tokens=4096, eos_token_id=2),
    "by row: typical-p": dict(do_sample=True, typical_p=0.9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+", choices=KINDS, help="besides greedy")
    given = parser.parse_args()
    kinds = {n: o for n, o in KINDS.items() if not given.only or n == "greedy" or n in given.only}
    found = measure(kinds, given.requests, given.prompt, given.tokens, given.rounds, given.threads)
    print(f"{given.requests} requests, prompts of {given.prompt} tokens; medians in ms\n")
    print("| kind | step | forward | sample | commit | of a step |\n|---|---|---|---|---|---|")
    own = {name: ms(steps, lambda s: s.sample_s + s.commit_s) for name, steps in found.items()}
    for name, steps in found.items():
        step = ms(steps, lambda s: s.host_s + s.forward_s + s.sample_s)
        parts = [step, *(ms(steps, lambda s, n=n: getattr(s, n)) for n in ("forward_s", "sample_s", "commit_s"))]
        share = (own[name] - own["greedy"]) / step
        print(f"| {name} | {' | '.join(f'{p:.2f}' for p in parts)} | {share:.1%} |")


def ms(steps: list[StepRecord], of: Any) -> float:
    return 1e3 * median(map(of, steps))


def measure(
    kinds: dict[str, dict[str, Any]], requests: int, prompt: int, tokens: int, rounds: int, threads: int | None
) -> dict[str, list[StepRecord]]:
    """The steps in which all requests decode, by kind."""
    model, tokenizer = demo_model()
    model = accelerate(model, tokenizer, num_threads=threads, max_num_seqs=requests)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(100, 40_000, (requests, prompt), generator=generator).tolist()
    found: dict[str, list[StepRecord]] = defaultdict(list)
    try:
        for _ in range(rounds):
            for name, options in kinds.items():
                with model.continuous_batching_context_manager() as manager:
                    base = dict(max_new_tokens=tokens, do_sample=False, eos_token_id=-1)
                    with manager.pause():  # so that they decode together, however long submission takes
                        handles = [manager.submit(p, **(base | options)) for p in prompts]
                    for handle in handles:
                        handle.result()
                    found[name] += [s for s in manager.trace() if s.decode_tokens == requests == s.query_tokens]
    finally:
        restore(model)
    missing = [name for name in kinds if not found[name]]
    if missing:
        raise SystemExit(f"In {missing} not all requests ever decoded together: give more --tokens.")
    return found


if __name__ == "__main__":
    main()
