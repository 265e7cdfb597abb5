"""List runs: state, step, last loss, best metric, age of the last news."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tr_log import formatting
from tr_log.report.run_folder import RunFolder, find_runs
from tr_log.streams import write_text

_HEADS = ("run", "state", "step", "loss", "best", "last news")
_DISPENSABLE = ("best", "loss", "step", "last news")
"""Columns that a narrow terminal does without, in this order."""
_SHORTEST_NAME = 16


def main(argv: Sequence[str]) -> int:
    """Print a line for each run.

    Returns:
        0, or 1 if there is no run.
    """
    parser = argparse.ArgumentParser(
        prog="trainer ls",
        description="List runs, oldest first: state, step, last loss, best metric and the age of the last news. A run "
        "is finished, stopped (before its last step, without an error), failed (with an error), killed (it ended "
        "without a word) or running; on another machine, one without news for long counts as killed. A terminal that "
        "is too narrow shows fewer columns; a pipe gets all.",
    )
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[Path()],
        metavar="OUTPUT_DIR",
        help="of a run, or a folder of runs (default: the current folder)",
    )
    try:
        runs = find_runs(parser.parse_args(argv).folders)
    except OSError as error:
        write_text(sys.stderr, f"{error}\n")
        return 1
    columns = {head: [head, *cells] for head, *cells in zip(_HEADS, *map(_row, runs), strict=True)}
    if sys.stdout.isatty():
        _fit(columns, shutil.get_terminal_size().columns)
    for line in formatting.table(list(zip(*columns.values(), strict=True))):
        write_text(sys.stdout, f"{line}\n")
    return 0


def _fit(columns: dict[str, list[str]], width: int) -> None:
    """Remove columns, and shorten the names of runs at their beginning, until a line fits."""
    for head in (*_DISPENSABLE, ""):
        others = sum(max(map(len, columns[name])) + 2 for name in columns if name != "run")
        longest = max(map(len, columns["run"]))
        if others + min(longest, _SHORTEST_NAME) <= width or not head:
            most = max(width - others, 4)
            columns["run"] = [name if len(name) <= most else "..." + name[3 - most :] for name in columns["run"]]
            return
        del columns[head]


def _row(run: RunFolder) -> tuple[str, ...]:
    best, loss = run.best(), run.newest("loss")
    return (
        str(run.path),
        run.status,
        str(run.step) if run.max_steps is None else f"{run.step}/{run.max_steps}",
        "" if loss is None else formatting.value(loss),
        "" if best is None else f"{best[0].removeprefix('eval_')} {formatting.value(best[1])} (step {best[2]})",
        f"{_age(time.time() - run.news_s)} ago",
    )


def _age(seconds: float) -> str:
    for unit, length, until in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < until:
            return f"{max(seconds, 0) / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
