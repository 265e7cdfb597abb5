"""Attack checkpoints, inputs and processes, and count what was lost, executed, written outside, hung or ended wrongly.

`python run.py` prints a table, a line a group, and exits with 1 if anything went wrong. `--quick` does a
part of each attack, `--only NAME` one attack, `--keep` leaves the folders.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from attack_counts import KINDS, Count, Options

# Each is a module `attack_NAME` beside this file, whose function `attack(options)` yields a `Count` for each group.
ATTACKS: dict[str, str] = {
    "storage": "every operation on files fails, for a moment and for good, on one process and on ranks",
    "schedules": "random read and write errors, kills and resumes, one after the other",
    "conditions": "quotas, full and slow disks, clocks that go back, process numbers used again, many shards",
    "files": "hostile checkpoints at every door, changed bytes in every parser, drawn names and states",
    "arguments": "hostile argument files and command lines",
    "pushes": "folders with links and private names at every depth are pushed to a Hub",
    "hosts": "two hosts, by namespaces of names, save to one folder",
    "signals": "signals at every phase, to every kind of process",
    "ranks": "a rank that raises, ends or is slow, in each place",
    "mutations": "checks taken out one at a time: an attack or a test must notice",
}

SHOWN = 10  # problems that are printed of each group
WIDTHS = (28, 9, *(len(kind) + 2 for kind in KINDS))


def main(arguments: list[str] | None = None) -> int:
    """Do the attacks and return the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="\n".join(f"{name:<12} {what}" for name, what in ATTACKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=ATTACKS, help="one attack; may be given again")
    parser.add_argument("--quick", action="store_true", help="a part of each attack")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default 1)")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes that share the work")
    parser.add_argument("--keep", action="store_true", help="leave the folders")
    options = parser.parse_args(arguments)
    # Under nohup, or behind a shell's `&`, these would be ignored here and in all that is started.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="attack-")))
    try:
        return _attacks(root, options)
    finally:
        if options.keep:
            print(f"kept: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


def _attacks(root: Path, options: argparse.Namespace) -> int:
    _line(["group", "tried", *KINDS, "ends"])
    counts: list[Count] = []
    for name in options.only or ATTACKS:
        folder = root / name
        folder.mkdir()
        began = time.monotonic()
        attack = importlib.import_module(f"attack_{name}").attack
        for count in attack(Options(folder, options.seed, options.jobs, options.quick)):
            _line(count.row())
            for kind, text in count.problems[:SHOWN]:
                print(f"  {kind.upper()} {text}", flush=True)
            counts.append(count)
        print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)
    problems = sum(len(count.problems) for count in counts)
    print(f"attacks {sum(count.tried for count in counts):,}, problems {problems:,}")
    return 1 if problems else 0


def _line(cells: list[str]) -> None:
    aligned = [cell.rjust(width) for cell, width in zip(cells[1:], WIDTHS[1:], strict=False)]
    print("  ".join([cells[0].ljust(WIDTHS[0]), *aligned, *cells[len(WIDTHS) :]]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
