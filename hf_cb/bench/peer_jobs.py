"""What each peer is told: the model in the form that it reads, made once and kept in the user's cache, and sizes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_cb.bench.floor import TOKEN_BUDGET, model_cost
from hf_cb.bench.gguf_file import write_gguf
from hf_cb.bench.measured import CannotRun
from hf_cb.bench.peer import PeerError
from hf_cb.bench.workload import Workload

CONVERT_TIMEOUT = 3600.0
WEIGHT_FORMATS = {"bfloat16": "fp16", "float16": "fp16", "float32": "fp32"}  # of an export; it knows no bfloat16
EXPORT = "from optimum.commands.optimum_cli import main; main()"


def job_maker(
    name: str,
    python: str,
    model: Any,
    source: str,
    workload: Workload,
    max_seqs: int,
    prefix_caching: bool,
    given: str | None = None,
    revision: str | None = None,
) -> Callable[[], dict[str, Any]]:
    """Gives a function that makes the peer's job.

    Args:
        model: the loaded model, for its dtype and sizes, and for llama.cpp its weights.
        source: the model's folder or Hub id.
        given: the model in the peer's own form, if there is one already.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    largest = sorted((len(r.prompt) + r.max_new for r in workload.requests), reverse=True)[:max_seqs]

    def make() -> dict[str, Any]:
        if model.device.type != "cpu" and name != "vllm":
            raise CannotRun(f"it is run on the CPU, and the model is on {model.device}")
        path = given or _convert(name, python, model, source, dtype, revision)
        return {
            "model": path,
            "dtype": dtype,
            "threads": torch.get_num_threads(),
            "max_seqs": max_seqs,
            "max_len": workload.longest,
            "token_budget": TOKEN_BUDGET,
            "kv_tokens": sum(largest),
            "kv_bytes": sum(largest) * model_cost(model).kv_token(),
            "prefix_caching": prefix_caching,
        }

    return make


def cache_folder() -> Path:
    """Where converted models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_cb" / "peers"


def _convert(name: str, python: str, model: Any, source: str, dtype: str, revision: str | None) -> str:
    folder = _local(source, revision)
    if name == "vllm":
        return str(folder)
    kept = cache_folder() / f"{folder.name}-{_fingerprint(folder)}"
    if name == "llamacpp":
        file = kept / f"{dtype}.gguf"
        if not file.exists():
            kept.mkdir(parents=True, exist_ok=True)
            write_gguf(model, file, model.dtype)
        return str(file)
    if dtype not in WEIGHT_FORMATS:
        raise CannotRun(f"no export is made of a model in {dtype}")
    exported = kept / f"openvino-{WEIGHT_FORMATS[dtype]}"
    if not exported.exists():
        _export(python, folder, exported, WEIGHT_FORMATS[dtype])
    return str(exported)


def _export(python: str, folder: Path, out: Path, weight_format: str) -> None:
    """By optimum-intel, in OpenVINO's own environment."""
    partial = out.with_name(f"{out.name}.{os.getpid()}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    what = ["export", "openvino", "-m", str(folder), "--task", "text-generation-with-past"]
    hidden = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV")
    try:
        done = subprocess.run(
            [python, "-c", EXPORT, *what, "--weight-format", weight_format, str(partial)],
            capture_output=True,
            text=True,
            timeout=CONVERT_TIMEOUT,
            cwd=partial.parent,  # which is on its path: nothing is to be imported from where we happen to be
            env={key: value for key, value in os.environ.items() if key not in hidden} | {"HF_HUB_OFFLINE": "1"},
        )
        if done.returncode != 0:
            raise PeerError(f"exporting the model for openvino failed: {done.stderr.strip()[-2000:]}")
        os.replace(partial, out)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"exporting the model for openvino failed: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _local(source: str, revision: str | None) -> Path:
    """The model's folder; a model from the Hub has been loaded by now, so it is in the Hub's cache."""
    if os.path.isdir(source):
        return Path(source).resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=revision, local_files_only=True))


def _fingerprint(folder: Path) -> str:
    """Changes with the model's files."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            stat = file.stat()
            digest.update(f"{folder} {file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]
