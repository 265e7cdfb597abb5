"""Break a run in every way that can be counted, let it go on, and compare its end with that of the run left alone."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # as many threads, as many different last bits
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

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
from crash_session import Session
from crash_training import train
from crash_true_kills import true_kills
from runner import Campaign, Case, Group, Options, Tally, main


def _power_cuts(session: Session) -> Iterable[Case]:
    recorded = recordings(session)
    for number, recording in enumerate(recorded):
        yield Case(
            f"order of {recording.name}", lambda folder, r=recording: Tally.of("; ".join(out_of_order(r.events)), 0)
        )
        # A step that is saved again: what comes after it is what the first run has shown.
        second = [n for n, event in enumerate(recording.events) if event.kind == "promise"]
        yield from chunks(session, recording, second[0] + 1 if number == 2 else None)


def _operations(session: Session) -> Iterable[Case]:
    yield from counted_exactly(session)
    yield from kills_before_operations(session, "kill")


GROUPS = {
    "operations": Group("killed before every operation on files", _operations, 48),
    "torn": Group("killed in the middle of every write", lambda s: kills_before_operations(s, "tear"), 24),
    "replacing": Group("killed while a step is saved again", kills_while_replacing, 8),
    "steps": Group("killed at every step, at each place in it", kills_at_places, 12),
    "twice": Group("killed again in clearing up and retention", double_faults, 30),
    "disk": Group("disk full or failing at every operation", failing_disks, 60),
    "power": Group("power cut at every operation: possible disks", _power_cuts, 24),
    "recovery": Group("power cut in the clearing up after a kill", recoveries, 8),
    "damage": Group("every file of the newest checkpoint damaged", damages, 12),
    "optimizers": Group("killed at every place with each optimizer", each_optimizer, 120),
    "ranks": Group("two ranks killed, with in-backward optimizers", each_optimizer_on_ranks, 40),
    "kill -9": Group("kill -9 of a program at random times", true_kills, 2),
    "mutations": Group("code broken on purpose: must be noticed", mutants, 5),
}


def prepare(options: Options) -> Session:
    """Let the run alone, and have everything imported that forks of this process need.

    Raises:
        RuntimeError: something is wrong before any fault.
    """
    torch.set_num_threads(1)
    train(options.folder / "warm" / "run")
    gc.collect()
    gc.freeze()  # and share their memory with it for longer
    session = Session(options.folder, options.quick)
    if problems := session.prepare():
        raise RuntimeError("; ".join(problems))
    alone = session.alone[False]
    print(
        f"The run left alone: {len(alone.saved)} saves, {len(alone.operations)} operations on files, "
        f"{len(alone.places)} places where it is killed; its end is {session.end[:16]}."
    )
    return session


if __name__ == "__main__":
    sys.exit(main(Campaign("crash", __doc__ or "", GROUPS, prepare=prepare)))
