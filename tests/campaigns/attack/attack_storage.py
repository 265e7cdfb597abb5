"""Let every call on files fail, with every error that file systems give, for a moment and for good, on every rank.

Real runs, on one process, on two ranks of a loop by hand, and on two of the Trainer, new ones and resumed ones, saving
in the foreground and in the background. Their calls go through failing_disk.c; where there is no C compiler, only the
operations on files are replaced. After each fault it is judged what is left, how the run ended, and how the run ends
that goes on from there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import failing_disk
from failing_disk import ALL, ERRORS, FOR_GOOD, SHORT, Aim
from runner import Case, Options, Tally
from storage_stages import STAGES, Attacked

# The groups: how many faults, which stages begin with this, and whether operations in place of calls are struck.
GROUPS = (
    ("one process", 1000, "trainer, ", False),
    ("two ranks of a loop by hand", 1000, "two ranks, ", False),
    ("two ranks of the Trainer", 120, "trainers, ", False),
    ("operations, one process", 120, "trainer, ", True),
    ("operations, two ranks", 120, "two ranks, ", True),
)
WAYS = [f"{kind}{saves}" for saves in ("", ", asynchronous") for kind in ("new", "resumed")]
QUICK = 5  # of a quick attack, one fault in so many
TIMES = (1, 1, 3, FOR_GOOD)


def cases(options: Options) -> Iterator[Case]:
    """Yield faults of each group, spread over the positions of all calls of each run."""
    for name, number, begins, of_files in GROUPS:
        if not failing_disk.is_here() and not of_files:
            continue
        drawn, found, turn = random.Random(options.seed), [], 0
        of_group = number // QUICK if options.quick else number
        for stage in [begins + way for way in WAYS]:
            place = options.folder / "stages" / f"{name} {stage}".replace(", ", "-").replace(" ", "-")
            attacked = Attacked(STAGES[stage], place, of_files=of_files)
            for rank, calls in enumerate(attacked.calls):
                of_rank = max(1, of_group // len(WAYS) // len(attacked.calls))
                positions = list(range(len(calls)))
                drawn.shuffle(positions)
                for position in (positions * (1 + of_rank // len(positions)))[:of_rank]:
                    turn += 1
                    aim = _aim(calls, position, list(ERRORS), turn, of_files)
                    label = f"{stage}, rank {rank}, {aim}"
                    found.append(Case(label, partial(_struck, attacked, rank, aim), f"storage: {name}"))
        drawn.shuffle(found)
        yield from found


def _struck(attacked: Attacked, rank: int, aim: Aim, folder: Path) -> Tally:
    return attacked.attack(folder, rank, aim)


def _aim(calls: list[str], position: int, names: list[str], turn: int, of_files: bool) -> Aim:
    times, kind = TIMES[turn % len(TIMES)], calls[position]
    if of_files:
        return Aim(ALL, position + 1, times, names[turn % len(names)], of_files=True)
    if kind in ("read", "write") and turn % 7 == 0:
        return Aim(frozenset({kind}), _place(calls, position, {kind}), times, mode=SHORT)
    possible = [name for name in names if kind in ERRORS[name]]
    name = possible[turn % len(possible)]
    if name == "EINTR" and times == FOR_GOOD:  # a call is made again after each signal: it never is for good
        times = 3
    return Aim(ERRORS[name], _place(calls, position, ERRORS[name]), times, name)


def _place(calls: list[str], position: int, kinds: frozenset[str] | set[str]) -> int:
    return sum(call in kinds for call in calls[: position + 1])
