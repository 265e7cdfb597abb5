"""Make curves of log entries, with few points and all extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tr_log.formatting import TIMINGS

HIDDEN = ("step", "epoch", "total_flos", "time_s")
HIDDEN_ENDINGS = ("_runtime", "_steps_per_second", "_model_preparation_time")
FIRST = ("loss", "learning_rate", "grad_norm", "eval_loss")

Curve = tuple[list[int], list[float | None]]
"""Steps and values; None where a value is not a number or infinite."""


def curves(entries: Sequence[dict[str, Any]], most_points: int) -> dict[str, Curve]:
    """Return the curve of every logged number by name: loss, rate and norm first, then the others as they were logged.

    What a run logs once at its end (`train_...`) is no curve.

    Args:
        entries: log entries, each with its `step`.
        most_points: points of a curve at most.
    """
    found: dict[str, Curve] = {}
    for entry in entries:
        for name, value in entry.items():
            if name in HIDDEN or name.startswith("train_") or name.endswith(HIDDEN_ENDINGS):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            steps, values = found.setdefault(name, ([], []))
            steps.append(entry["step"])
            values.append(float(value) if math.isfinite(value) else None)
    order = [name for name in FIRST if name in found]
    order += [name for name in found if name not in FIRST and not name.endswith(TIMINGS)]
    order += [name for name in found if name not in order]
    return {name: thin(*found[name], most_points) for name in order}


def thin(steps: Sequence[int], values: Sequence[float | None], most_points: int) -> Curve:
    """Return a curve with at most `most_points` points, among them the first, the last, and the extremes of each part.

    The points are divided into parts of equal number. Of each part its lowest, its highest and one that is not a number
    remain, if there are any, in their order.
    """
    count = len(steps)
    if count <= most_points:
        return list(steps), [_short(value) for value in values]
    parts = max((most_points - 2) // 3, 1)
    kept = {0, count - 1}
    for part in range(parts):
        indices = range(part * count // parts, (part + 1) * count // parts)
        numbers = [(value, index) for index in indices if (value := values[index]) is not None]
        if numbers:
            kept |= {min(numbers)[1], max(numbers)[1]}
        if len(numbers) < len(indices):
            kept.add(next(index for index in indices if values[index] is None))
    ordered = sorted(kept)
    return [steps[index] for index in ordered], [_short(values[index]) for index in ordered]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
