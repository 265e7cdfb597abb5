"""Break a run in every way that can be counted, let it go on, and compare its end with that of the run left alone.

`python run.py` prints a table of campaigns and, last, `faults N, mismatches M`; it exits with 1 if there
are mismatches. `--quick` does a part of each campaign, `--only NAME` one campaign, `--keep` leaves the folders of what
went wrong.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # as many threads, as many different last bits
sys.path.insert(0, str(Path(__file__).parent))

import torch
from crash_kills import (
    counted_exactly,
    damages,
    double_faults,
    failing_disks,
    kills_at_places,
    kills_before_operations,
    kills_while_replacing,
)
from crash_mutations import mutants
from crash_optimizers import each_optimizer, each_optimizer_on_ranks
from crash_order import out_of_order
from crash_power_cut import chunks, recordings, recoveries
from crash_session import Fault, Session, Tally
from crash_training import train
from crash_true_kills import true_kills

# Of each campaign so many mismatches are printed, so much of each; with --keep all are in a file.
SHOWN, SHOWN_CHARACTERS = 10, 400


def _power_cuts(session: Session) -> Iterable[Fault]:
    recorded = recordings(session)
    for number, recording in enumerate(recorded):
        yield Fault(f"order of {recording.name}", lambda folder, r=recording: Tally(0, out_of_order(r.events)))
        # A step that is saved again: what comes after it is what the first run has shown.
        second = [n for n, event in enumerate(recording.events) if event.kind == "promise"]
        yield from chunks(session, recording, second[0] + 1 if number == 2 else None)


def _operations(session: Session) -> Iterable[Fault]:
    yield from counted_exactly(session)
    yield from kills_before_operations(session, "kill")


CAMPAIGNS: dict[str, tuple[str, Callable[[Session], Iterable[Fault]], int]] = {
    "operations": ("killed before every operation on files", _operations, 48),
    "torn": ("killed in the middle of every write", lambda s: kills_before_operations(s, "tear"), 24),
    "replacing": ("killed while a step is saved again", kills_while_replacing, 8),
    "steps": ("killed at every step, at each place in it", kills_at_places, 12),
    "twice": ("killed again in clearing up and retention", double_faults, 30),
    "disk": ("disk full or failing at every operation", failing_disks, 60),
    "power": ("power cut at every operation: possible disks", _power_cuts, 24),
    "recovery": ("power cut in the clearing up after a kill", recoveries, 8),
    "damage": ("every file of the newest checkpoint damaged", damages, 12),
    "optimizers": ("killed at every place with each optimizer", each_optimizer, 120),
    "ranks": ("two ranks killed, with in-backward optimizers", each_optimizer_on_ranks, 40),
    "kill -9": ("kill -9 of a program at random times", true_kills, 2),
    "mutations": ("code broken on purpose: must be noticed", mutants, 5),
}


def main(arguments: list[str] | None = None) -> int:
    """Do the campaigns and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a strided part of each campaign")
    parser.add_argument("--only", action="append", choices=CAMPAIGNS, help="one campaign; may be given again")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes that share the faults")
    parser.add_argument("--keep", action="store_true", help="leave the folders of what went wrong")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, _stop)
    memory = Path("/dev/shm")  # nothing here can see whether a sync is slow
    place = memory if os.access(memory, os.W_OK) else None
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="crash-", dir=place)))
    try:
        return _campaigns(Session(root / "session", options.jobs, options.quick), options.only or list(CAMPAIGNS))
    finally:
        if options.keep:
            print(f"kept: {root}")
        else:
            shutil.rmtree(root)


def _stop(*_: object) -> None:
    """Leave by an exception, which removes what would else stay in memory."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def _campaigns(session: Session, names: list[str]) -> int:
    session.root.mkdir()
    train(session.root / "warm" / "run")  # forks of this process then have everything imported
    gc.collect()
    gc.freeze()  # and share their memory with it for longer
    total, began = Tally(problems=session.prepare()), time.monotonic()
    alone = session.alone[False]
    print(
        f"The run left alone: {len(alone.saved)} saves, {len(alone.operations)} operations on files, "
        f"{len(alone.places)} places where it is killed; its end is {session.end[:16]}."
    )
    print(f"{'campaign':<10}  {'what':<46}  {'faults':>7}  {'mismatches':>10}  {'seconds':>7}")
    notes: list[str] = []
    for problem in total.problems:
        print(f"  MISMATCH {problem}")
    for name in names:
        what, faults, stride = CAMPAIGNS[name]
        start = time.monotonic()
        tally = session.do(name, session.chosen(list(faults(session)), stride))
        took = time.monotonic() - start
        print(f"{name:<10}  {what:<46}  {tally.faults:>7,}  {len(tally.problems):>10,}  {took:>7.1f}", flush=True)
        notes += [f"{name}: {count:,} {seen}" for seen, count in tally.seen.items()]
        for problem in tally.problems[:SHOWN]:
            print(f"  MISMATCH {problem[:SHOWN_CHARACTERS]}")
        total.add(tally)
    print("\n".join(["", *notes]))
    (session.root / "mismatches.txt").write_text("\n\n".join(total.problems))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processors"
        f"{'; a part of all' if session.quick else ''}"
    )
    print(f"faults {total.faults}, mismatches {len(total.problems)}")
    return 1 if total.problems else 0


if __name__ == "__main__":
    sys.exit(main())
