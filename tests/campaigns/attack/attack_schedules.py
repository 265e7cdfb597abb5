"""Read errors, write errors, kills and resumes, drawn at random, one process after the other, until the run ends.

A schedule is a small run that is started again and again. While a process works, some of its operations on checkpoints
fail or kill it; the last process is left alone. After each it is judged that the newest verified checkpoint is there
still, or a newer one, and how the process ended: with the bits of the run that nobody disturbed, or in words that say
why not. Errors of reading that pass must show nowhere.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from children import End, in_child
from crash_training import train
from runner import HUNG, LOST, WRONG_END, Case, Options, Tally
from schedule_ranks import REFERENCE, in_two_ranks
from schedule_storms import PASSING, Storm, draw

from tr_ckpt.testing import verified

SCHEDULES = {"schedules, one process": 500, "schedules, two ranks": 500}
QUICK = 25  # of a quick attack, one schedule in so many
PROCESSES = 6  # of a schedule; the last one is not disturbed

# What an end in words says: that something was not done, and of what.
_WORDS = re.compile(
    r"checkpoint(-\d+)? was not (saved|restored)|nothing was restored|older ones remain|cannot be (read|written)"
)


def cases(options: Options) -> Iterator[Case]:
    """Yield schedules of one process and of two ranks."""
    alone = train(options.folder / "alone")
    works = {"schedules, one process": partial(_one_process, alone), "schedules, two ranks": _two_ranks}
    for row, number in SCHEDULES.items():
        for each in range(number // QUICK if options.quick else number):
            label = f"seed {options.seed}, {row[11:]}, schedule {each}"
            yield Case(label, partial(works[row], (options.seed, each)), row)


def newest_verified(run: Path) -> tuple[int, int]:
    """Return the age of the newest checkpoint that is whole, every byte read; (0, 0) if there is none."""
    return max(verified(run), default=(0, 0))


def _one_process(alone: str, drawn: tuple[int, int], folder: Path) -> Tally:
    chance = random.Random(f"one {drawn}")
    settings: dict[str, Any] = {
        "save_steps": chance.choice((1, 2, 3)),
        "save_total_limit": chance.choice((None, 1, 2, 3)),
        "asynchronous": chance.random() < 0.4,
    }
    run = folder / "run"

    def process(storm: Storm, resume: bool | str) -> End:
        def work() -> str:
            with storm.raging():
                return train(run, resume=resume, **settings)

        return in_child(work)

    return _schedule(chance, run, process, alone)


def _two_ranks(drawn: tuple[int, int], folder: Path) -> Tally:
    chance = random.Random(f"two {drawn}")
    settings = {
        "every": chance.choice((1, 2, 3)),
        "keep_last": chance.choice((None, 1, 2, 3)),
        "asynchronous": chance.random() < 0.4,
    }
    run = folder / "run"

    def process(storm: Storm, resume: bool | str) -> End:
        # Of the threads that write in the background none says whose it is.
        storm.thread = (
            "writing" if settings["asynchronous"] and chance.random() < 0.5 else f"rank-{chance.randrange(2)}"
        )
        return in_child(lambda: in_two_ranks(run, storm, **settings))

    return _schedule(chance, run, process, REFERENCE)


def _schedule(chance: random.Random, run: Path, process: Any, alone: str) -> Tally:
    tally, before, told = Tally(1), (0, 0), []
    for number in range(PROCESSES):
        storm = draw(chance) if number < PROCESSES - 1 else Storm()
        resume = True if before != (0, 0) and chance.random() < 0.5 else "auto"
        outcome = process(storm, resume)
        told.append(f"{storm}, resume={resume}: {_short(outcome)}")
        after = newest_verified(run)
        if after < before or after[1] < before[1]:  # no run here goes back
            tally.wrong(LOST, f"{before} was there, now {after} is the newest; {'; '.join(told)}")
            return tally
        before = after
        if problem := _wrong_end(outcome, storm, alone):
            tally.wrong(HUNG if outcome.hung else WRONG_END, f"{problem}; {'; '.join(told)}")
            return tally
        tally.ends[_word(outcome)] += 1
        if outcome.answer is not None:
            return tally
    return tally


def _wrong_end(outcome: End, storm: Storm, alone: str) -> str:
    if outcome.answer is not None:
        return "" if outcome.answer == alone else "it ends with other bits"
    if outcome.hung:
        return "it did not end"
    if outcome.killed:
        return "" if storm.kind == "kill" else "killed by nobody"
    if storm.kind in PASSING:
        return "an error that passed ended it"
    return "" if _WORDS.search(outcome.raised) else "not in words"


def _word(outcome: End) -> str:
    if outcome.answer is not None:
        return "as if alone"
    return "killed" if outcome.killed else "in words"


def _short(outcome: End) -> str:
    return "ended" if outcome.answer is not None else "killed" if outcome.killed else outcome.raised[:300]
