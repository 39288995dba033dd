"""Measures what docs/studies/ shows: policies under real arrivals, and how much of a prompt goes into a step.

usage: python docs/make_studies.py [STUDY ...] [--rounds N] [--seconds S] [--model FOLDER]

Each study takes about three minutes with the demo model on a CPU, and writes a page and a picture of its own. Loads are
shares of what this machine can do, which is measured first; so run them on a quiet one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_cb.arrivals import Arrival, Trace
from hf_cb.bench.machine import circumstances
from hf_cb.bench.replay.calls import make_calls
from hf_cb.bench.replay.figures import NAMES
from hf_cb.bench.replay.formats import Shaped, shape
from hf_cb.bench.replay.generators import Lengths, generate
from hf_cb.bench.replay.intervals import Interval, draw_requests, interval, percentiles
from hf_cb.bench.replay.play import play
from hf_cb.bench.replay.plot import draw
from hf_cb.bench.replay.report import cell, unit_for
from hf_cb.bench.replay.settings import Setting, check_comparable, parse_options
from hf_cb.bench.replay.summary import described, replayed, summarize
from hf_cb.bench.replay.turn import Turn
from hf_cb.models.plan import model_length

FOLDER = Path(__file__).with_name("studies")
POLICIES = {"continuous": "policy=continuous", "static": "policy=static:8", "dynamic": "policy=dynamic:8:0.05"}
LOADS = {"low": 0.15, "medium": 0.5, "high": 0.9}  # of the requests a second that continuous batching can do
PROMPTS, OUTPUTS = Lengths.parse("lognormal:128:0.8"), Lengths.parse("uniform:16:128")
CHUNKS = (32, 64, 128, 256, 512)
RUNNING, NEWCOMERS, GAP = 4, 6, 1.0  # answers that run, prompts that come meanwhile, seconds between these


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    from hf_cb.cli.model import load

    model, tokenizer = load(args)
    studies: dict[str, Callable[[], None]] = {
        **{
            f"policies-{load}": lambda share=share, load=load: policies(args, model, load, share)
            for load, share in LOADS.items()
        },
        "prefill-chunk": lambda: prefill_chunk(args, model),
    }
    if unknown := set(args.study) - set(studies):
        print(f"unknown: {', '.join(sorted(unknown))}; the studies are {', '.join(studies)}", file=sys.stderr)
        return 2
    args.folder.mkdir(exist_ok=True)
    for name in args.study or studies:
        print(f"study {name}", file=sys.stderr, flush=True)
        studies[name]()
    return 0


def policies(args: argparse.Namespace, model: Any, load: str, share: float) -> None:
    """Static, dynamic and continuous batching on the same arrivals."""
    rate = share * _capacity(model)
    n = max(8, round(rate * args.seconds))
    trace = generate("poisson", rate, n, PROMPTS, OUTPUTS, seed=1)
    settings = [Setting(name, parse_options(text)) for name, text in POLICIES.items()]
    summary = _measure(args, model, shape(trace, max_len=model_length(model)), settings)
    draw(summary, args.folder / f"policies-{load}.png")
    text = [
        f"Poisson arrivals, {rate:.2f} requests a second ({share:.0%} of what continuous batching does at most on this "
        f"machine); prompts {_words(PROMPTS)}, outputs {_words(OUTPUTS)} tokens.",
        "",
        *_table(summary, {"TTFT": "ttft", "ITL": "itl", "end to end": "e2e"}),
        "",
        *(f"- {d['b']} against {d['a']}: {d['verdict']}." for d in summary["differences"]),
    ]
    _write(args, f"policies-{load}", f"Policies at {load} load", summary, text)


def prefill_chunk(args: argparse.Namespace, model: Any) -> None:
    """How long newcomers' prompts hold up running answers, and what keeping them short costs the newcomers."""
    length = model_length(model)
    arrivals = [Arrival(0.0, min(64, length // 4), min(600, length // 2)) for _ in range(RUNNING)]
    arrivals += [Arrival(0.5 + GAP * i * args.seconds / 12, min(1000, length // 2), 8) for i in range(NEWCOMERS)]
    settings = [Setting(str(chunk), {"prefill_chunk": chunk}) for chunk in CHUNKS]
    summary = _measure(args, model, shape(Trace("newcomers", tuple(arrivals)), max_len=length), settings)
    rows = {name: _trade_off(summary, name) for name in summary["settings"]}
    _draw_trade_off(summary, rows, args.folder / "prefill-chunk.png")
    text = [
        f"{RUNNING} answers of {arrivals[0].output_tokens} tokens are running while {NEWCOMERS} prompts of "
        f"{arrivals[-1].prompt_tokens} tokens come, one after the other.",
        "",
        "| prefill_chunk | running answers: ITL p50, ms | p95 | p99 | max | newcomers: TTFT p50, s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {' | '.join(cell(v.as_list(), 1e3, 1) for v in row[:4])} | {cell(row[4].as_list(), 1, 2)} |"
            for name, row in rows.items()
        ),
    ]
    _write(args, "prefill-chunk", "How much of a prompt goes into a step", summary, text)


def _capacity(model: Any) -> float:
    """Requests a second that continuous batching does if all of them are there."""
    trace = generate("poisson", 1e6, 32, PROMPTS, OUTPUTS, seed=2)
    shaped = shape(trace, max_len=model_length(model))
    (turn,) = play(model, check_comparable([Setting("most")]), _calls(model, shaped))
    return len(turn.requests) / turn.seconds


def _calls(model: Any, shaped: Shaped) -> Any:
    return make_calls(shaped.trace, model.get_input_embeddings().weight.shape[0])


def _measure(args: argparse.Namespace, model: Any, shaped: Shaped, settings: list[Setting]) -> dict[str, Any]:
    configs = check_comparable(settings)

    def say(turn: Turn) -> None:
        print(f"  round {turn.round + 1}, {turn.setting}: {turn.seconds:.1f} s", file=sys.stderr, flush=True)

    turns = play(model, configs, _calls(model, shaped), args.rounds, say)
    about = circumstances(model, args.model or "demo") | replayed(shaped, {}, 1.0)
    return summarize(about, described(settings, configs), turns, None, 0.95)


def _table(summary: Mapping[str, Any], latencies: Mapping[str, str]) -> list[str]:
    shown = NAMES[:3]
    lines = [f"| | tok/s | {' | '.join(f'{title} {p}' for title in latencies for p in shown)} |"]
    lines.append("|---" * (2 + len(latencies) * len(shown)) + "|")
    for name, found in summary["settings"].items():
        cells = [cell(found["throughput"], 1, 0)]
        for key in latencies.values():
            for percent in shown:
                factor, digits, unit = unit_for(found["latency"][key][percent][0])
                cells.append(f"{cell(found['latency'][key][percent], factor, digits)} {unit}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _trade_off(summary: Mapping[str, Any], name: str) -> list[Interval]:
    """Of the running answers the gaps' p50, p95, p99 and longest, of the newcomers the median first token."""
    import numpy as np

    turns = [Turn.from_dict(t) for t in summary["turns"] if t["setting"] == name]
    counts = {RUNNING: draw_requests(RUNNING), NEWCOMERS: draw_requests(NEWCOMERS)}
    gaps, firsts = [], []
    for turn in turns:
        of = [(gap, i) for i, r in enumerate(turn.requests[:RUNNING]) for gap in r.gaps]
        gaps.append(percentiles([g for g, _ in of], [i for _, i in of], counts[RUNNING], (50, 95, 99, 100)))
        ttft = [r.ttft_s for r in turn.requests[RUNNING:]]
        firsts.append(percentiles(ttft, range(NEWCOMERS), counts[NEWCOMERS], (50,)))
    stacked, of_newcomers = np.stack(gaps), np.stack(firsts)
    of_running = [interval(stacked[:, :, i], 0.95, requests_too=i < 3) for i in range(4)]
    return [*of_running, interval(of_newcomers[:, :, 0], 0.95)]


def _draw_trade_off(summary: Mapping[str, Any], rows: Mapping[str, list[Interval]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for column, label in ((2, "p99 of the gaps"), (3, "longest gap")):
        x = [row[4].value for row in rows.values()]
        y = [1e3 * row[column].value for row in rows.values()]
        axes.plot(x, y, "o-", label=label)
        for name, at in zip(rows, zip(x, y, strict=True), strict=True):
            axes.annotate(name, at, textcoords="offset points", xytext=(5, 5))
    axes.set(xlabel="newcomers: median time to first token (s)", ylabel="running answers: time between tokens (ms)")
    axes.set(title="prefill_chunk, in tokens", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _write(args: argparse.Namespace, name: str, title: str, summary: Mapping[str, Any], text: Sequence[str]) -> None:
    machine, versions, model = summary["machine"], summary["versions"], summary["model"]
    warnings = {w for found in summary["settings"].values() for w in found["warnings"] if "busy" in w}
    lines = [
        f"# {title}",
        "",
        f"{summary['date']}, {machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} "
        f"threads, torch {versions['torch']}, transformers {versions['transformers']}; {model['class']} with "
        f"{model['parameters'] / 1e6:.0f} million parameters in {model['dtype']}; rounds: {summary['rounds']}, 95 % "
        f"intervals in brackets. `python docs/make_studies.py {name}`",
        "",
        *text,
        *(f"\nWARNING: {w}" for w in sorted(warnings)),
        "",
        f"![{title}]({name}.png)",
    ]
    (args.folder / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _words(lengths: Lengths) -> str:
    return (
        f"{lengths.kind} {lengths.first:g} to {lengths.second:g}"
        if lengths.kind == "uniform"
        else (f"{lengths.kind} (median {lengths.first:g}, sigma {lengths.second:g})")
    )


def _parser() -> argparse.ArgumentParser:
    from hf_cb.cli import model

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("study", nargs="*", help="which (default: all)")
    parser.add_argument("--rounds", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals in a turn (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="(default: %(default)s)")
    model.add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
