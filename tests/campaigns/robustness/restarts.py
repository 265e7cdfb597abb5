"""Kill a rank under a launcher that may restart once, and count the jobs that end as one left alone.

Under `trainer launch` and torchrun, half of those by `--standalone` and half at a port that was given, each killed at
another moment; with DDP, and with FSDP2, whose shards come from a checkpoint that both ranks wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from kills import LIMIT_S, ROWS, read_end
from rank_programs import RANK_RUN, TORCHRUN, TRAINER, Job, free_port, nursery
from runner import Case, Options
from sample_records import read_starts, rows_of_steps

RUNS = 20  # of each strategy and launcher
# Place and how often it is reached before the kill; rank 1 does half as many operations on files as rank 0.
MOMENTS = [
    *(("forward", times) for times in range(1, 7)),
    *(("file", times) for times in (1, 5, 9, 12, 17, 24)),
    *(("backward", times) for times in (2, 5)),
    *(("exchanged", times) for times in (1, 4)),
    *(("evaluation", 1), ("saved", 1), ("saved", 3), ("dataset", 4)),
]

_Alone = tuple[dict[str, Any], dict[int, list[int]]]


def command_of(launcher: str, number: int) -> list[str]:
    """Return the launcher's part of the command line."""
    if launcher == "trainer launch":
        return [*TRAINER, "--nproc", "2", "--max_restarts", "1"]
    place = ["--standalone"] if number % 2 else ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [*TORCHRUN, *place, "--nproc-per-node=2", "--max-restarts=1"]


def _restart(kind: tuple[str, str], number: int, alone: _Alone, folder: Path) -> str:
    """Return what is wrong with a job that is killed at one of the moments and started again by its launcher."""
    return "; ".join(_wrong(kind, number, alone, folder))


def _wrong(kind: tuple[str, str], number: int, alone: _Alone, folder: Path) -> list[str]:
    place, times = MOMENTS[number % len(MOMENTS)]
    out, (strategy, launcher) = folder / "out", kind
    fault = ["--place", place, "--times", str(times), "--how", "kill", "--rank", str(number % 2)]
    with Job(folder) as job:
        job.start([*command_of(launcher, number), RANK_RUN, out, "--strategy", strategy, *fault])
        [end] = job.ends(LIMIT_S)
        wrong = [f"{len(left)} processes are left"] if (left := job.left_over()) else []
    if not (out / "struck").exists():
        return [*wrong, f"it did not strike: {end.code}, {end.said[-1500:]}"]
    if end.code:
        return [*wrong, f"the job ended with {end.code}: {end.said[-3000:]}"]
    wrong += [f"its {name} are others" for name, value in read_end(out).items() if value != alone[0][name]]
    wrong += [] if rows_of_steps(out) == alone[1] else [f"its steps used {rows_of_steps(out)}, not {alone[1]}"]
    meetings = {start[0]["meeting"] for start in read_starts(out) if start}
    return wrong + ([] if len(meetings) in (1, 2) else [f"its ranks met {len(meetings)} times"])


def restarts(options: Options) -> Iterator[Case]:
    """Yield kills at each moment, with each strategy and launcher."""
    kinds = list(product(("ddp", "fsdp"), ("trainer launch", "torchrun")))
    alone = {strategy: leave_alone(strategy, options.folder / f"alone-{strategy}") for strategy in ("ddp", "fsdp")}
    for number, kind in product(range(RUNS), kinds):
        place, times = MOMENTS[number % len(MOMENTS)]
        label = f"{', '.join(kind)}, rank {number % 2} killed at {place} {times}"
        yield Case(label, partial(_restart, kind, number, alone[kind[0]]), f"restarts, {', '.join(kind)}")


def leave_alone(strategy: str, folder: Path) -> _Alone:
    """Return the end of a job that nothing happens to, and the rows of its steps, which are all, once."""
    nursery().run(2, [folder, "--strategy", strategy], folder.with_name(f"{folder.name}-job"), LIMIT_S)
    steps = rows_of_steps(folder)
    assert sorted(row for rows in steps.values() for row in rows) == list(range(ROWS))
    return read_end(folder), steps
