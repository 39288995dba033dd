"""Numbers as people read them."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """Two or three digits of it, from 0.1 ms up; a dash for NaN."""
    if math.isnan(seconds):
        return "–"
    if seconds >= 0.9995:
        return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"
