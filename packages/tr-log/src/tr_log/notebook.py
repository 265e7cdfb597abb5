"""Show bars, a table of the logs and a curve of the loss in the output of a notebook's cell, which is changed in place.

`in_notebook` detects a notebook.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, ClassVar

from tr_log import formatting
from tr_log.layout import Display
from tr_log.report.curves import thin

SECONDS_BETWEEN_UPDATES = 0.5
COLUMNS = 110
MOST_ROWS = 100  # of the table; all entries are in metrics.jsonl
MOST_POINTS = 400
MOST_COLUMNS = 10
NOT_IN_TABLE = ("total_flos", "_runtime", "_per_second", "_model_preparation_time")
CURVES = (("loss", "#2a78d6", ""), ("eval_loss", "#d9601a", "5 3"))
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 220, 60, 28


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, of any kind that shows HTML."""
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(_shell()).__mro__)


def _shell() -> Any:
    get_ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


class NotebookOutput(Display):
    """The output of one cell: bars with their figures, the last message, a curve of the losses, a table of the logs.

    Args:
        clock: a monotonic clock, in seconds.
    """

    _newest: ClassVar[NotebookOutput | None] = None

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self._message = ""
        self._entries: dict[int, dict[str, Any]] = {}  # by step
        self._handle: Any = None
        self._cell = getattr(_shell(), "execution_count", None)

    @classmethod
    def current(cls) -> NotebookOutput:
        """Return the output that shows bars now or is empty, if it is one of this cell, or a new one."""
        newest = cls._newest
        if newest is None or not (newest._bars or newest._is_empty_here()):
            newest = cls._newest = cls()
        return newest

    def _is_empty_here(self) -> bool:
        is_empty = not (self._message or self._entries)
        return is_empty and self._cell == getattr(_shell(), "execution_count", None)

    def draw(self) -> None:
        """Change the output now. What is below the last bar remains as the output of the cell."""
        text = f"<div>{self._bars_as_html()}{self._message_as_html()}{self._curve()}{self._table()}</div>"
        content = {"text/html": text, "text/plain": self._message}
        if self._handle is None:
            from IPython.display import display  # type: ignore[import-not-found]

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        self._next_s = self.clock() + SECONDS_BETWEEN_UPDATES

    def write(self, line: str, style: str = "") -> None:
        """Show a message in place of the last one."""
        self._message = line
        self.draw()

    def log(self, pieces: Sequence[str], step: int, entry: Mapping[str, Any], style: str = "") -> None:
        """Add a log entry to table and curve; entries of the same step share a row."""
        known = {formatting.SHORT_NAMES.get(name, name): formatting.to_scalar(entry[name]) for name in entry}
        self._entries.setdefault(step, {}).update(known)
        if self.is_due() or not self._bars:
            self.draw()

    def _bars_as_html(self) -> str:
        if not self._bars:
            return ""
        from rich.console import Console
        from rich.text import Text

        console = Console(
            file=io.StringIO(),
            record=True,
            width=COLUMNS,
            force_terminal=True,
            force_jupyter=False,
            legacy_windows=False,
        )
        lines = self._layout.lines([bar.row() for bar in self._bars], console, COLUMNS, 20)
        console.print(Text("\n").join(lines), soft_wrap=True)
        style = "margin:0;line-height:1.4;color:inherit;background:none;font-family:monospace;overflow-x:auto"
        return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')

    def _message_as_html(self) -> str:
        return f'<div style="margin:4px 0">{escape(self._message)}</div>' if self._message else ""

    def _table(self) -> str:
        if not self._entries:
            return ""
        rows = list(self._entries.items())
        names = dict.fromkeys(name for _, entry in rows for name in entry if not name.endswith(NOT_IN_TABLE))
        columns = sorted(names, key=lambda name: name.startswith("eval_"))[:MOST_COLUMNS]
        cell = "padding:1px 10px;text-align:right;font-variant-numeric:tabular-nums"
        head = "".join(f'<th style="{cell}">{escape(name)}</th>' for name in ["step", *columns])
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="{cell}">{escape(text)}</td>'
                for text in [str(step), *(_value(name, entry) for name in columns)]
            )
            + "</tr>"
            for step, entry in reversed(rows[-MOST_ROWS:])
        )
        left_out = f"<div>the last {MOST_ROWS} of {len(rows)}</div>" if len(rows) > MOST_ROWS else ""
        style = "border-collapse:collapse;margin:0;color:inherit;font-size:inherit"
        table = f'<table style="{style}"><thead><tr>{head}</tr></thead>{body}</table>'
        return f'<div style="max-height:300px;overflow:auto">{table}</div>{left_out}'

    def _curve(self) -> str:
        drawn = []
        for name, colour, dashes in CURVES:
            points = {
                step: float(value)
                for step, entry in self._entries.items()
                if isinstance(value := entry.get(name), int | float) and math.isfinite(value)
            }
            if len(points) > 1:
                steps, values = thin(list(points), list(points.values()), MOST_POINTS)
                drawn.append((name, colour, dashes, list(zip(steps, values, strict=True))))
        return _svg(drawn) if drawn else ""


def _value(name: str, entry: Mapping[str, Any]) -> str:
    if name == "epoch" and isinstance(entry.get(name), int | float):
        return f"{entry[name]:.2f}"
    return formatting.value(entry[name]) if name in entry else ""


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers within a range."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    each = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first = math.ceil(low / each - 1e-9)
    return [number * each for number in range(first, math.floor(high / each + 1e-9) + 1)]


def _svg(curves: Sequence[tuple[str, str, str, list[tuple[int, float]]]]) -> str:
    points = [point for *_, curve in curves for point in curve]
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def x(step: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - 12) * (step - first) / (last - first):.1f}"

    def y(value: float) -> str:
        return f"{(HEIGHT - BOTTOM) - (HEIGHT - BOTTOM - 22) * (value - low) / (high - low):.1f}"

    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y(v)}" y2="{y(v)}" stroke="currentColor" stroke-opacity="0.15"/>'
        f'<text x="{LEFT - 6}" y="{y(v)}" text-anchor="end" dominant-baseline="middle">{v:.4g}</text>'
        for v in ticks(low, high)
    ]
    parts += [
        f'<text x="{x(step)}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{step:g}</text>'
        for step in ticks(first, last, 8)
        if step == int(step)
    ]
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 2}" text-anchor="middle">step</text>')
    for number, (name, colour, dashes, curve) in enumerate(curves):
        path = " ".join(f"{x(step)},{y(value)}" for step, value in curve)
        look = f'stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dashes}" fill="none"'
        parts.append(f'<polyline points="{path}" {look}/>')
        at = LEFT + 10 + 100 * number
        parts.append(f'<line x1="{at}" x2="{at + 22}" y1="10" y2="10" {look}/><text x="{at + 28}" y="14">{name}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width:100%;font:11px sans-serif" '
        f'fill="currentColor" role="img" aria-label="loss by step">{"".join(parts)}</svg>'
    )
