"""The time from `import hf_cb` to the first token, in a process where nothing but the model is loaded.

`time_first_token` runs this very file as a script, so nothing of hf_cb may be imported at its top.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

TIMEOUT = 900.0  # seconds, with loading


def time_first_token(loading: dict[str, Any], prompt: list[int], options: dict[str, Any]) -> dict[str, float]:
    """Measures in a fresh process; seconds: `import_s`, `accelerate_s`, `generate_s` (one token), `total_s`.

    Args:
        loading: "source", "model" and "tokenizer" (arguments of `from_pretrained`), and "device" or None.
        prompt: token ids.
        options: fields of `EngineConfig`; all three must go through JSON.

    Raises:
        RuntimeError: the process failed; the message has the end of what it said.
    """
    job = json.dumps({"loading": loading, "prompt": prompt, "options": options})
    # the child is to find the packages that this process finds, and not this file's neighbours (-P)
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-P", __file__, job],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | {"PYTHONPATH": paths},
    )
    if done.returncode != 0:
        raise RuntimeError(f"Timing the first token failed: {done.stderr.strip()[-2000:]}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def measure(loading: dict[str, Any], prompt: list[int], options: dict[str, Any]) -> dict[str, float]:
    """`time_first_token`'s work, in this process."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(loading["source"], **loading["tokenizer"])
    model: Any = AutoModelForCausalLM.from_pretrained(loading["source"], **loading["model"]).eval()
    if loading["device"] is not None:
        model.to(loading["device"])
    times = [time.perf_counter()]
    hf_cb: Any = importlib.import_module("hf_cb")  # by name, as it is above this floor: here it is what is measured
    times.append(time.perf_counter())
    hf_cb.accelerate(model, tokenizer, **options)
    times.append(time.perf_counter())
    try:
        model.generate_batch([prompt], max_new_tokens=1, do_sample=False)
    finally:
        times.append(time.perf_counter())
        hf_cb.restore(model)
    return {
        "import_s": times[1] - times[0],
        "accelerate_s": times[2] - times[1],
        "generate_s": times[3] - times[2],
        "total_s": times[3] - times[0],
    }


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
