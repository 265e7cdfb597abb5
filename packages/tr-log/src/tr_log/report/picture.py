"""Draw the curves of one or several runs into one PNG file, by matplotlib."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from tr_log.report.curves import WORDS
from tr_log.report.page import page_data
from tr_log.report.run_folder import RunFolder

# Colours of Okabe and Ito, which people with any colour vision tell apart; dashes do it without colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#2e8fc7", "#6e6e6e")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (9, 2)), (0, (1, 4)))
INK, FAINT, LINE = "#1a1d21", "#5c6670", "#d9dde1"
COLUMNS, MOST_PANELS, MOST_NAMED_RUNS = 3, 30, 14
PANEL_WIDTH, PANEL_HEIGHT, DOTS_PER_INCH = 4.4, 2.9, 110
NICE = (1, 2, 2.5, 5, 10)
FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "WenQuanYi Micro Hei",
    "PingFang SC",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "Malgun Gothic",
)
"""matplotlib's own, and those of systems that have the letters of Chinese, Japanese and Korean."""
FEW_POINTS = 25
"""Points of a curve up to which each is marked: there may be a line to no other."""
MISSING = (
    "--png draws by matplotlib, which is not installed ({error}): run `pip install 'tr-log[png]'`, or leave --png out"
)


def picture(runs: Sequence[RunFolder]) -> bytes:
    """Return a PNG file with a panel for each curve that the page of these runs has; several runs share the panels.

    Raises:
        ImportError: matplotlib is not installed; the message says how to install it.
    """
    try:
        matplotlib, figure = import_module("matplotlib"), import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(MISSING.format(error=error)) from None
    data, known = page_data(runs), set(import_module("matplotlib.font_manager").get_font_names())
    settings = {"text.parse_math": False, "font.size": 9, "font.family": [name for name in FONTS if name in known]}
    # A dollar sign in a name begins no formula; a letter that no font has is a box, not a warning.
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        made = io.BytesIO()
        _draw(data, figure.Figure).savefig(made, format="png", dpi=DOTS_PER_INCH)
    return made.getvalue()


def _draw(data: dict[str, Any], figure_class: Any) -> Any:
    runs, panels = data["runs"], list(_panels(data["runs"]))
    shown = panels[:MOST_PANELS]
    columns = min(max(len(shown), 1), COLUMNS)
    rows = max(math.ceil(len(shown) / columns), 1)
    named = runs[:MOST_NAMED_RUNS] if len(runs) > 1 else []
    left_out = [f"{len(panels) - len(shown)} more curves"] if len(panels) > len(shown) else []
    left_out += [f"{len(runs) - len(named)} more runs in the legend"] if named and len(runs) > len(named) else []
    head, foot = 0.45 + 0.22 * math.ceil(len(named) / columns), 0.3 if left_out else 0.05
    width, height = max(columns * PANEL_WIDTH, 7.0), rows * PANEL_HEIGHT + head + foot
    figure = figure_class(figsize=(width, height), facecolor="white", layout="constrained")
    figure.get_layout_engine().set(rect=(0, foot / height, 1, 1 - (head + foot) / height), h_pad=0.12, w_pad=0.08)
    figure.text(0.1 / width, 1 - 0.1 / height, _title(runs, data["made"]), va="top", fontsize=11, color=INK)
    if not shown:
        figure.text(0.5, 0.45, "Nothing has been logged yet.", ha="center", color=FAINT, fontsize=11)
        return figure
    grid = figure.subplots(rows, columns, squeeze=False)
    steps = [curve["x"][at] for run in runs for curve in run["curves"].values() for at in (0, -1)]
    for place, names in zip(grid.flat, shown, strict=False):
        _panel(place, names, runs, (min(steps), max(steps)))
    for place in grid.flat[len(shown) :]:
        place.set_axis_off()
    if named:
        line: Any = import_module("matplotlib.lines").Line2D
        lines = [line([], [], **_style(index)) for index in range(len(named))]
        corner = (0.0, 1 - 0.3 / height)
        labels = [_label(run) for run in named]
        legend = figure.legend(lines, labels, loc="upper left", bbox_to_anchor=corner, ncols=columns, frameon=False)
        legend.set_in_layout(False)
    if left_out:
        figure.text(0.1 / width, 0.1 / height, f"not shown: {', '.join(left_out)}", fontsize=9, color=FAINT)
    return figure


def _panels(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the names of the curves of each panel: of one run, the losses of training and evaluation share one."""
    names = list(dict.fromkeys(name for run in runs for name in run["curves"]))
    together = ("loss", "eval_loss") if len(runs) == 1 else ("", "")
    for name in names:
        if name == together[0] and together[1] in names:
            yield together
        elif name != together[1] or together[0] not in names:
            yield (name,)


def _panel(place: Any, names: tuple[str, ...], runs: Sequence[dict[str, Any]], steps: tuple[int, int]) -> None:
    has_number = False
    for index, run in enumerate(runs):
        for number, name in enumerate(names):
            if (curve := run["curves"].get(name)) is None:
                continue
            values = [math.nan if value is None else value for value in curve["y"]]
            has_number |= not all(map(math.isnan, values))
            marker = "." if len(values) <= FEW_POINTS else ""
            style = _style(number if len(names) > 1 else index)
            place.plot(curve["x"], values, label=f" {name}", marker=marker, markersize=5, **style)
    if len(runs) == 1:
        for session in runs[0]["sessions"][1:]:
            place.axvline(session["first"], color=INK, linewidth=0.8, linestyle=":", zorder=1)
    margin = max((steps[1] - steps[0]) * 0.02, 0.5)
    place.set_xlim(steps[0] - margin, steps[1] + margin)
    place.set_title(" and ".join(map(_heading, names)), fontsize=10, color=INK, loc="left")
    place.set_xlabel("step", color=FAINT, labelpad=1)
    _axes(place)
    if not has_number:
        place.set_yticks([])
        place.text(0.5, 0.5, "never a number", transform=place.transAxes, ha="center", color=FAINT)
    if len(names) > 1:
        place.legend(frameon=False, fontsize=8, handlelength=2.5)


def _heading(name: str) -> str:
    word, unit = WORDS.get(name, (name, ""))
    return f"{word} ({unit})" if unit else word


def _axes(place: Any) -> None:
    """Draw few lines, and label them by short numbers."""
    ticker: Any = import_module("matplotlib.ticker")
    place.grid(color=LINE, linewidth=0.7)
    place.set_axisbelow(True)
    place.tick_params(colors=FAINT, length=3)
    for side, edge in place.spines.items():
        edge.set_visible(side in ("left", "bottom"))
        edge.set_color(LINE)
    place.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True, min_n_ticks=1, steps=NICE))
    place.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=NICE))
    for axis in (place.xaxis, place.yaxis):
        largest = max(map(abs, axis.get_view_interval()))
        axis.set_major_formatter(ticker.FuncFormatter(_exponential if not 1e-3 <= largest < 1e6 else _plain))


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.5}


def _label(run: dict[str, Any]) -> str:
    # matplotlib leaves out a label that begins with an underscore.
    return f" {_short(run['name'], 34)}  ({run['status']})"


def _title(runs: Sequence[dict[str, Any]], made: str) -> str:
    if len(runs) != 1:
        return f"{len(runs)} runs, {made}"
    steps = dict(runs[0]["facts"]).get("steps", "")
    restarts = ", restarts dotted" if len(runs[0]["sessions"]) > 1 else ""
    return f"{_short(runs[0]['name'], 50)}: {runs[0]['status']}, steps {steps}{restarts}, {made}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _plain(value: float, position: int = 0) -> str:
    return f"{value:.10f}".rstrip("0").rstrip(".") if abs(value) > 1e-10 else "0"


def _exponential(value: float, position: int = 0) -> str:
    """Return `2.5e-5`, not `2.5e-05`."""
    mantissa, _, power = f"{value:.6e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}" if value else "0"
