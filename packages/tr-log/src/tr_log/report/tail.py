"""Print the last log entries of a run, and follow it until it ends."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tr_log import formatting
from tr_log.report.run_folder import RunFolder, files_of, find_runs
from tr_log.streams import write_text

SHARE = 10
"""Looking for news may take one second in so many: reading a long file takes time that the run needs."""


def main(argv: Sequence[str]) -> int:
    """Print the last log entries of a run, and with `--follow` those that come, until the run ends.

    Returns:
        0, or 1 if there is no run.
    """
    parser = argparse.ArgumentParser(
        prog="trainer tail",
        description="Print the last log entries of a run, and how it ended. When a run resumes, what it does again is "
        "printed again, after a line that says so.",
    )
    parser.add_argument("folder", type=Path, metavar="OUTPUT_DIR", help="of the run")
    parser.add_argument("-n", type=int, default=10, metavar="ENTRIES", help="how many (default 10)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with those that come, until the run ends")
    parser.add_argument(
        "-F", "--retry", action="store_true", help="as -f, and wait for a restart if it was not finished"
    )
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="look for them so often (default 1)"
    )
    options = parser.parse_args(argv)
    if options.n < 0 or not 0 < options.every < 1e6:
        parser.error(f"-n {options.n} must be 0 or more, and --every {options.every:g} above 0 and below a million")
    waits = ("running", "killed", "failed", "stopped") if options.retry else ("running",) if options.follow else ()
    try:
        for line in _lines(_only_run(options.folder), options.n, options.every, waits):
            write_text(sys.stdout, line + "\n")
            sys.stdout.flush()
    except BrokenPipeError:  # `| head` has what it wants
        return 0
    except OSError as error:
        write_text(sys.stderr, f"{error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _only_run(folder: Path) -> Path:
    runs = find_runs([folder])
    if len(runs) > 1:
        names = ", ".join(str(run.path) for run in runs[-5:])
        raise FileNotFoundError(f"{folder} holds {len(runs)} runs; give one of them: {names}")
    return runs[0].path


def _lines(folder: Path, number: int, every_s: float, waits: Sequence[str]) -> Iterator[str]:
    """Yield the last entries; then, while the state is one of `waits`, those that come; and each state but running."""
    printed: list[dict[str, Any]] = []
    sessions, said = 0, ""
    for look in count():
        began_s, seen = time.thread_time(), files_of(folder)
        run = RunFolder.read(folder)
        kept = _common(printed, run.entries)
        if look and (kept < len(printed) or len(run.sessions) > sessions):
            yield _restart(run)
        yield from map(_line, run.entries[max(len(run.entries) - number, 0) if not look else kept :])
        printed, sessions = run.entries, len(run.sessions)
        status = run.status
        if (news := f"{status} at step {run.step}") != said and status != "running" and sessions:
            yield _ending(run)
        said = news
        if status not in waits:
            return
        pause_s = max(every_s, SHARE * (time.thread_time() - began_s))
        time.sleep(pause_s)
        while files_of(folder) == seen and run.status == status:
            time.sleep(every_s)


def _common(earlier: Sequence[object], later: Sequence[object]) -> int:
    """Return how many entries at the beginning are the same, compared as text, in which NaN equals itself."""
    most = min(len(earlier), len(later))
    return next((n for n in range(most) if repr(earlier[n]) != repr(later[n])), most)


def _restart(run: RunFolder) -> str:
    return f"resumed from step {run.sessions[-1].first_step}" if run.sessions else "entries were removed"


def _ending(run: RunFolder) -> str:
    error = f": {run.sessions[-1].error}" if run.sessions[-1].error else ""
    return f"{run.status} at step {formatting.position(run.step, run.max_steps)}{error}"


def _line(entry: dict[str, object]) -> str:
    return f"step {entry['step']}  " + "  ".join(formatting.evaluation({n: v for n, v in entry.items() if n != "step"}))
