"""Draws the pictures of docs/how-it-works.md from steps of the demo model. usage: python docs/make_pictures.py

Answers have fixed lengths, so the steps are nearly the same on any machine; where time is drawn, it should be quiet.
"""

from __future__ import annotations

import io
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import hf_cb
from hf_cb.metrics.files import write_file
from hf_cb.metrics.timeline import plot_timeline
from hf_cb.steps import StepRecord

FOLDER = Path(__file__).with_name("pictures")
WIDTH = 10.0  # inches
MARGIN = 0.9  # of these, beside the steps


class Ask(NamedTuple):
    """A prompt as token ids, the length of its answer, and after how many tokens of the first answer it comes."""

    prompt: list[int]
    length: int
    after: int = 0


def words(count: int, seed: int) -> list[int]:
    """Token ids that no other seed begins with."""
    return [1000 * (seed + 1) + i for i in range(count)]


def run(model: Any, asks: list[Ask], **options: Any) -> list[StepRecord]:
    """The steps of these requests, the prefix cache empty at first."""
    hf_cb.accelerate(model, **options)
    try:
        manager = model.init_continuous_batching()
        sampling = {"do_sample": False, "eos_token_id": -1}
        handles = [manager.submit(a.prompt, max_new_tokens=a.length, **sampling) for a in asks if not a.after]
        manager.start()
        later = sorted((a for a in asks if a.after), key=lambda a: a.after)
        seen = 0
        for delta in handles[0]:
            seen += len(delta.token_ids)
            while later and later[0].after <= seen:
                late = later.pop(0)
                handles.append(manager.submit(late.prompt, max_new_tokens=late.length, **sampling))
        for handle in handles:
            handle.result()
        records: list[StepRecord] = manager.trace()
        manager.stop()
        return records
    finally:
        hf_cb.restore(model)


def stacked(parts: list[tuple[str, list[StepRecord]]], path: Path, by: Literal["time", "steps"] = "steps") -> None:
    """Runs one below the other, a step or a second as wide in each."""
    from PIL import Image

    def length(records: list[StepRecord]) -> float:
        return len(records) if by == "steps" else records[-1].ended - records[0].started

    most = max(length(records) for _, records in parts)
    images = []
    with TemporaryDirectory() as folder:
        for i, (title, records) in enumerate(parts):
            width = MARGIN + (WIDTH - MARGIN) * length(records) / most
            plot_timeline(records, Path(folder, f"{i}.png"), by=by, title=title, width=width)
            images.append(Image.open(io.BytesIO(Path(folder, f"{i}.png").read_bytes())))
    whole = Image.new("RGB", (max(i.width for i in images), sum(i.height for i in images)), "white")
    for i, image in enumerate(images):
        whole.paste(image.convert("RGB"), (0, sum(above.height for above in images[:i])))
    drawn = io.BytesIO()
    whole.quantize(64).save(drawn, format="PNG", optimize=True)
    write_file(path, drawn.getvalue())


def static_and_continuous(model: Any) -> None:
    lengths = [30, 8, 14, 5, 10, 22, 6, 12, 9, 16, 5, 8]
    asks = [Ask(words(20, i), length) for i, length in enumerate(lengths)]
    parts = []
    for policy, title in (("static:4", "Static: four at a time"), ("continuous", "Continuous: four places")):
        records = run(model, asks, policy=policy, max_num_seqs=4, block_size=16, num_blocks=40)
        parts.append((f"{title}, {len(records)} steps", records))
    stacked(parts, FOLDER / "static-continuous.png")


def prefill_chunks(model: Any) -> None:
    asks = [Ask(words(12, i), length) for i, length in enumerate((40, 36, 32))]
    asks += [Ask(words(400, 3), 12, after=8), Ask(words(90, 4), 10, after=8)]
    parts = []
    for chunk, title in ((512, "Prompts whole"), (64, "Prompts in chunks of 64")):
        records = run(model, asks, prefill_chunk=chunk, max_batch_tokens=512, block_size=16, num_blocks=64)
        parts.append((title, records))
    stacked(parts, FOLDER / "prefill-chunks.png", by="time")


def short_of_blocks(model: Any) -> None:
    system = words(64, 0)
    asks = [Ask(system + words(10, 1), 40)]
    asks += [Ask(system + words(10, 2 + i), 36, after=3) for i in range(3)]
    asks += [Ask(words(60, 7), 28, after=6)]
    records = run(model, asks, block_size=8, num_blocks=36, max_batch_tokens=64)
    stacked([("36 blocks of 8 tokens", records)], FOLDER / "blocks.png")


def main() -> None:
    model, _ = hf_cb.demo_model()
    static_and_continuous(model)
    prefill_chunks(model)
    short_of_blocks(model)


if __name__ == "__main__":
    main()
