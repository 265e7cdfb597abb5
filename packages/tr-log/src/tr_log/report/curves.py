"""Make curves of log entries, and thin a long one to what a display can show."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tr_log.formatting import TIMINGS

HIDDEN = ("step", "epoch", "total_flos", "time_s")
RATES = {
    "samples_per_second": ("samples_per_second", 1.0),
    "tokens_per_second": ("tokens_per_second", 1.0),
    "flops_per_second": ("teraflops", 1e-12),
    "mfu": ("mfu", 100.0),
    "memory_bytes": ("memory", 2.0**-30),
    "memory_peak_bytes": ("memory_peak", 2.0**-30),
    "cpu": ("cpu", 100.0),
    "cpu_of_process": ("cpu_of_process", 100.0),
    "gpu": ("gpu", 100.0),
    "ram_bytes": ("ram", 2.0**-30),
}
"""Figures of throughput and load: the curve of each, and its unit in that of the events."""
WORDS = {
    "grad_norm": ("gradient norm", ""),
    "learning_rate": ("learning rate", ""),
    "steps_per_second": ("speed", "steps/s"),
    "samples_per_second": ("speed", "samples/s"),
    "tokens_per_second": ("speed in tokens", "tokens/s"),
    "teraflops": ("operations", "10^12/s"),
    "mfu": ("MFU", "% of the devices' peak"),
    "memory": ("memory", "GiB"),
    "memory_peak": ("memory at its peak", "GiB"),
    "cpu": ("processor busy", "% of all processors"),
    "cpu_of_process": ("main process alone", "% of all processors"),
    "gpu": ("GPU busy", "% of the time"),
    "ram": ("memory of the machine", "GiB"),
}
"""What a curve is called, and its unit, of those whose name does not say it."""
OF = {"eval_": "evaluation ", "test_": "prediction ", "predict_": "prediction "}
"""What the metrics of evaluations and predictions begin with, and how people say that."""
HIDDEN_ENDINGS = ("_runtime", "_steps_per_second", "_model_preparation_time")
FIRST = ("loss", "learning_rate", "grad_norm", "eval_loss")

_BETWEEN_WORDS = re.compile(r"(?<=[^_])_(?=[^_])")

Curve = tuple[list[int], list[float | None]]
"""Steps and values; None where a value is not a number or infinite."""


def curves(entries: Sequence[dict[str, Any]]) -> dict[str, Curve]:
    """Return the curve of every logged number by name: loss, rate and norm first, then the others as they were logged.

    What a run logs once at its end (`train_...`) is not a curve.
    """
    found: dict[str, Curve] = {}
    shown: dict[str, bool] = {}  # asked once a name: a run may have a million entries
    for entry in entries:
        for name, value in entry.items():
            if name not in shown:
                shown[name] = not (name in HIDDEN or name.startswith("train_") or name.endswith(HIDDEN_ENDINGS))
            if not shown[name] or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            steps, values = found.setdefault(name, ([], []))
            steps.append(entry["step"])
            values.append(float(value) if math.isfinite(value) else None)
    order = [name for name in FIRST if name in found]
    order += [name for name in found if name not in FIRST and not name.endswith(TIMINGS)]
    order += [name for name in found if name not in order]
    return {name: found[name] for name in order}


def words_of(name: str) -> tuple[str, str]:
    """Return what people call a logged number, and its unit: `eval_f1_macro` is the `evaluation f1 macro`."""
    if name == "loss":
        return "training loss", ""
    of = next((start for start in OF if name.startswith(start)), "")
    name = name.removeprefix(of)
    title, unit = WORDS.get(name) or (_BETWEEN_WORDS.sub(" ", name), "")
    return OF.get(of, "") + title, unit


def rate_curves(rates: Sequence[dict[str, Any]]) -> dict[str, Curve]:
    """Return the curves of throughput, memory and load: operations in 10^12, shares in per cent, memory in GiB."""
    found = curves(rates)
    known = [(curve, found[name], unit) for name, (curve, unit) in RATES.items() if name in found]
    return {curve: (steps, [y and y * unit for y in values]) for curve, (steps, values), unit in known}


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


def means(steps: Sequence[int], values: Sequence[float | None], parts: int) -> Curve:
    """Return the mean of each of so many parts, at its middle step; None for a part without a number."""
    bounds = [part * len(steps) // parts for part in range(parts + 1)]
    slices = [values[first:last] for first, last in pairwise(bounds)]
    numbers = [[value for value in one if value is not None] for one in slices]
    found = [sum(one) / len(one) if one else None for one in numbers]
    return [steps[(first + last) // 2] for first, last in pairwise(bounds)], [_short(value) for value in found]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
