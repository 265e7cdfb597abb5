"""Print the last log entries of a run, and follow it until it ends."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tr_log import formatting
from tr_log.report.run_folder import RunFolder
from tr_log.streams import write_text


def main(argv: Sequence[str]) -> int:
    """Print the last log entries of a run, and with `--follow` those that come, until the run ends.

    Returns:
        0, or 1 if there is no run.
    """
    parser = argparse.ArgumentParser(prog="trainer tail", description="Print the last log entries of a run.")
    parser.add_argument("folder", type=Path, metavar="OUTPUT_DIR", help="of the run")
    parser.add_argument("-n", type=int, default=10, metavar="ENTRIES", help="how many (default 10)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with those that come, until the run ends")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="look for them so often (default 1)"
    )
    options = parser.parse_args(argv)
    if options.n < 0 or options.every <= 0:
        parser.error(f"-n {options.n} must be 0 or more, and --every {options.every} above 0")
    try:
        for line in _lines(options.folder, options.n, options.every if options.follow else None):
            write_text(sys.stdout, line + "\n")
            sys.stdout.flush()
    except OSError as error:
        write_text(sys.stderr, f"{error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _lines(folder: Path, number: int, every_s: float | None) -> Iterator[str]:
    run = RunFolder.read(folder)
    shown = max(len(run.entries) - number, 0)
    while True:
        shown = min(shown, len(run.entries))  # a resumed run has removed entries
        for entry in run.entries[shown:]:
            yield _line(entry)
        shown = len(run.entries)
        if every_s is None or run.status != "running":
            break
        time.sleep(every_s)
        run = RunFolder.read(folder)
    if run.sessions:
        error = f": {run.sessions[-1].error}" if run.sessions[-1].error else ""
        yield f"{run.status} at step {formatting.position(run.step, run.max_steps)}{error}"


def _line(entry: dict[str, object]) -> str:
    return f"step {entry['step']}  " + "  ".join(formatting.entry(entry, leave_out=("step",)))
