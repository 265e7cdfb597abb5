"""Format logged values: as plain Python numbers, as strict JSON, and as short text for the console.

The text functions format numbers, durations, speeds, sizes and whole log entries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def to_scalar(item: Any) -> Any:
    """Convert `item` to a Python number if it holds exactly one (a numpy scalar, a tensor); else return it.

    Sync: for a tensor on a device. The loop logs Python numbers, so only a user's own entry costs this.
    """
    if isinstance(item, bool | int | float | str) or item is None:
        # numpy's float64 is a subclass of float, but prints with its own name.
        return float(item) if isinstance(item, float) else item
    read = getattr(item, "item", None)
    if callable(read):
        try:
            return read()
        except (TypeError, ValueError, RuntimeError):  # more than one element
            return item
    return item


def to_json(item: Any) -> str:
    """Return `item` as one line of strict JSON; see `to_strict`."""
    return json.dumps(to_strict(item), ensure_ascii=False, allow_nan=False)


def to_strict(item: Any) -> Any:
    """Convert values to what strict JSON can hold.

    Numbers that it cannot hold become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. Single numbers of numpy or a
    tensor become numbers. Other objects become text.
    """
    item = to_scalar(item)
    if isinstance(item, float) and not math.isfinite(item):
        return "NaN" if math.isnan(item) else ("Infinity" if item > 0 else "-Infinity")
    if item is None or isinstance(item, bool | int | float | str):
        return item
    if isinstance(item, Mapping):
        return {str(key): to_strict(inner) for key, inner in item.items()}
    if isinstance(item, list | tuple):
        return [to_strict(inner) for inner in item]
    return str(item)


LONGEST_VALUE = 100
TIMINGS = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")
SHORT_NAMES = {"learning_rate": "lr"}


def duration(seconds: float) -> str:
    """Return a duration as `2:03`, `1:02:03` or `2d 01:02:03`."""
    whole = max(0, round(seconds))
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02}:{m:02}:{s:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def speed(rate: float, unit: str = "it") -> str:
    """Return a speed as `3.2 it/s`; below one a second, the seconds of each, `2.1 s/it`."""
    if unit == "B":
        return f"{size(rate)}/s"
    return f"{_three_digits(rate)} {unit}/s" if rate >= 1 else f"{_three_digits(1 / rate)} s/{unit}"


def size(count: float) -> str:
    """Return a number of bytes as `1.5 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def count(amount: float) -> str:
    """Return a number in at most five characters: `3.21`, `812`, `52.4k`, `1.25M`."""
    for unit in ("", "k", "M", "G"):
        if round(amount) < 1000:
            return f"{_three_digits(amount)}{unit}"
        amount /= 1000
    return f"{amount:.4g}T"


def _three_digits(amount: float) -> str:
    # A speed is not known more precisely, and changing digits are hard to read.
    return f"{amount:.0f}" if amount >= 100 else f"{amount:#.3g}"


def number(amount: float) -> str:
    """Return a number with about four significant digits, without an exponent below ten million."""
    if 1000 <= abs(amount) < 1e7:
        return f"{amount:.1f}"
    return f"{amount:.4g}"


def value(item: Any) -> str:
    """Return a logged value in a few characters on one line."""
    item = to_scalar(item)
    if isinstance(item, bool | int) or item is None:
        return str(item)
    if isinstance(item, float):
        return number(item)
    text = printable(" ".join(str(item).split()))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return text with every character that does not print as itself in Python's notation: ESC becomes `\x1b`.

    This covers characters that move the cursor, set colours, titles or the clipboard, change the direction of writing
    or have no width, and lone surrogates. Escaping twice changes nothing more.

    Args:
        text: the value to show; `str` is applied to it.
        lines: whether line breaks and tabs are kept.
    """
    text = str(text)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def entry(logs: Mapping[str, Any], *, leave_out: tuple[str, ...] = ()) -> list[str]:
    """Return a log entry as `name value` pieces in its own order, the epoch last.

    Args:
        logs: the logged values; not changed.
        leave_out: names to skip.
    """
    names = [name for name in logs if name not in leave_out and name != "epoch"]
    if "epoch" in logs and "epoch" not in leave_out:
        names.append("epoch")
    return [f"{SHORT_NAMES.get(name) or printable(str(name))} {value(logs[name])}" for name in names]


def evaluation(metrics: Mapping[str, Any]) -> list[str]:
    """Return the metrics of an evaluation as pieces, with all timings in one: `1.5 s, 812.3 samples/s`."""
    timings = {part: name for name in metrics for part in TIMINGS if name.endswith(part)}
    pieces = entry(metrics, leave_out=tuple(name for name in metrics if name.endswith(TIMINGS)))
    took = []
    if "_runtime" in timings:
        took.append(f"{value(metrics[timings['_runtime']])} s")
    if "_samples_per_second" in timings:
        took.append(f"{value(metrics[timings['_samples_per_second']])} samples/s")
    return [*pieces, ", ".join(took)] if took else pieces


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, its cells in columns; rows have equally many cells."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def position(completed: int, total: int | None, unit: str = "it") -> str:
    """Return the position in a piece of work: `120/500 (24%)`, or `120` if the total is unknown."""
    done = size(completed) if unit == "B" else str(completed)
    if total is None or total <= 0:
        return done
    whole = size(total) if unit == "B" else str(total)
    return f"{done}/{whole} ({100 * completed // total}%)"
