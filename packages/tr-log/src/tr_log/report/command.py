"""Write the page of one or several runs: curves, where the time went, arguments, warnings."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from tr_log.report.at_end import REPORT_FILE, write_report
from tr_log.streams import write_text


def main(argv: Sequence[str]) -> int:
    """Write the page of one or several runs, and print its path.

    Returns:
        0, or 1 if there is no such run, or a file cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="trainer report",
        description="Make one HTML file of a run: its curves, where its time went, its arguments, warnings and files. "
        "Several runs are laid over each other, with the arguments in which they differ. The file needs no network.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUTPUT_DIR", help="of a run, or a folder of runs")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"where to write it (default: {REPORT_FILE} in OUTPUT_DIR)"
    )
    parser.add_argument("--png", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    options = parser.parse_args(argv)
    target = options.output or options.folders[0] / REPORT_FILE
    if options.png:
        parser.error("--png draws no picture any more: leave it out, open the page, and print it from the browser")
    try:
        write_report(options.folders, target)
        write_text(sys.stdout, f"{target}\n")
    except OSError as error:
        write_text(sys.stderr, f"{error}\n")
        return 1
    if options.open:
        webbrowser.open(target.resolve().as_uri())
    return 0
