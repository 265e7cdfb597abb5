"""List runs: state, step, last loss, best metric, age of the last news."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tr_log import formatting
from tr_log.report.run_folder import RunFolder, find_runs
from tr_log.streams import write_text

_HEADS = ("run", "state", "step", "loss", "best", "last news")


def main(argv: Sequence[str]) -> int:
    """Print a line for each run.

    Returns:
        0, or 1 if there is no run.
    """
    parser = argparse.ArgumentParser(
        prog="trainer ls",
        description="List runs: state (running, finished, stopped, failed, killed), step, last loss, best metric and "
        "the age of the last news.",
    )
    parser.add_argument(
        "folders", nargs="*", type=Path, default=[Path()], metavar="OUTPUT_DIR", help="of a run, or a folder of runs"
    )
    try:
        runs = find_runs(parser.parse_args(argv).folders)
    except OSError as error:
        write_text(sys.stderr, f"{error}\n")
        return 1
    rows = [_HEADS, *(_row(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        write_text(sys.stdout, "  ".join(cells).rstrip() + "\n")
    return 0


def _row(run: RunFolder) -> tuple[str, ...]:
    best, loss = run.best(), run.newest("loss")
    return (
        str(run.path),
        run.status,
        formatting.position(run.step, run.max_steps),
        "" if loss is None else formatting.value(loss),
        "" if best is None else f"{best[0]} {formatting.value(best[1])} (step {best[2]})",
        f"{formatting.duration(time.time() - run.news_s)} ago",
    )
