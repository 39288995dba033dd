"""What a comparison comes to, in words, and which of several settings to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_cb.bench.replay.figures import CONFIDENCE, Difference, Figures, compare
from hf_cb.bench.replay.slo import Slo
from hf_cb.bench.replay.turn import Turn

LABELS = {
    "ttft_p50": "TTFT p50",
    "ttft_p95": "TTFT p95",
    "itl_p95": "ITL p95",
    "e2e_p50": "e2e p50",
    "throughput": "throughput",
    "goodput": "goodput",
}
NONE = "no difference beyond the interval"


@dataclass(frozen=True)
class Recommendation:
    """A setting, or None where the measurement does not tell; and why."""

    setting: str | None
    evidence: list[str]


def row_verdict(row: Difference, a: str, b: str) -> str:
    """ "A is faster, by 5..9 %" or that there is no difference to be seen."""
    by = row.faster_by
    if row.change.low is None:
        return "one round does not tell"
    if by is None:
        return NONE
    name = {"a": a, "b": b}[row.better or "a"]
    word = {"throughput": "does more", "goodput": "does more"}.get(row.name, "is faster")
    if by[1] >= 1:
        return f"{name} {word}, {1 + by[0]:.2g} to {1 + by[1]:.2g} times"
    return f"{name} {word}, by {_percent(by[0])}..{_percent(by[1])} %"


def overall(rows: Sequence[Difference], a: str, b: str) -> str:
    """One sentence on all rows."""
    if not rows:
        return "nothing to compare: no request was served by both"
    better = {name: [LABELS[r.name] for r in rows if r.better == side] for side, name in (("a", a), ("b", b))}
    parts = [f"{name} is better in {', '.join(labels)}" for name, labels in better.items() if labels]
    if not parts and any(r.change.low is None for r in rows):
        return "one round does not tell: use --repeat"
    return "; ".join(parts) or NONE


class Pairs:
    """Comparisons of settings' turns, each made once, when it is asked for."""

    def __init__(
        self, turns: Mapping[str, Sequence[Turn]], slo: Slo | None = None, confidence: float = CONFIDENCE
    ) -> None:
        self.turns, self.slo, self.confidence = turns, slo, confidence
        self._found: dict[tuple[str, str], list[Difference]] = {}

    def rows(self, a: str, b: str) -> list[Difference]:
        """b against a."""
        if (a, b) not in self._found:
            self._found[a, b] = compare(self.turns[a], self.turns[b], self.slo, self.confidence)
        return self._found[a, b]

    def better_rows(self, a: str, b: str) -> list[tuple[str, str]]:
        """The rows in which a is better than b, and by how much, in words."""
        first, second = (a, b) if (a, b) in self._found or (b, a) not in self._found else (b, a)
        side = "a" if first == a else "b"
        rows = [r for r in self.rows(first, second) if r.better == side]
        return [(r.name, f"{LABELS[r.name]}: {row_verdict(r, first, second)} than {b}") for r in rows]


def recommend(pairs: Pairs, figures: Mapping[str, Figures]) -> Recommendation:
    """The setting to take.

    With an objective: of the settings that meet it (or, if none does, of all, by goodput), the one with the most
    throughput. Without: one that is better than every other in something and worse in nothing. Only differences beyond
    the interval count.
    """
    slo = pairs.slo
    if len(figures) < 2:
        return Recommendation(None, ["there is one setting only"])
    if slo is None:
        return _best_of_all(pairs, list(figures))
    kept = {name: f.kept or 0.0 for name, f in figures.items()}
    evidence = [
        f"{name} {'meets' if share >= slo.share else 'does not meet'} the SLO: {share:.1%} of its requests had {slo}, "
        f"and {slo.share:.0%} must"
        for name, share in kept.items()
    ]
    meeting = [name for name, share in kept.items() if share >= slo.share]
    left = meeting or list(figures)
    for row in (*(("throughput", "goodput") if meeting else ("goodput", "throughput")), "ttft_p95", "itl_p95"):
        if len(left) == 1:
            break
        beaten: dict[str, str] = {}
        for a in left:
            for b in left:
                said = [words for name, words in pairs.better_rows(a, b) if name == row] if a != b else []
                if said:
                    beaten.setdefault(b, said[0])
        evidence += beaten.values()
        left = [name for name in left if name not in beaten] or left
    if len(left) == 1:
        return Recommendation(left[0], evidence)
    if any(len(found) < 2 for found in pairs.turns.values()):
        return Recommendation(None, [*evidence, "between these, one round does not tell: use --repeat"])
    return Recommendation(None, [*evidence, f"between {', '.join(left)} there is {NONE}"])


def _best_of_all(pairs: Pairs, names: Sequence[str]) -> Recommendation:
    gains = {(a, b): pairs.better_rows(a, b) for a in names for b in names if a != b}
    for a in names:
        others = [b for b in names if b != a]
        if all(gains[a, b] for b in others) and not any(gains[b, a] for b in others):
            return Recommendation(a, [words for b in others for _, words in gains[a, b]])
    evidence = [words for found in gains.values() for _, words in found]
    if any(len(found) < 2 for found in pairs.turns.values()):
        return Recommendation(None, ["one round does not tell: use --repeat"])
    if not evidence:
        return Recommendation(None, [f"there is {NONE} between any two"])
    return Recommendation(None, [*evidence, "none is best in everything: say with --slo what has to be kept"])


def _percent(share: float) -> str:
    return f"{share * 100:.1f}" if share < 0.1 else f"{share * 100:.0f}"
