"""Kill a rank under a launcher that may restart once, and count the jobs that end as one left alone.

`python restarts.py --runs 20` does so many with `trainer launch` and with torchrun, half of those by
`--standalone` and half at a port that was given, each killed at another moment. It prints a line for each and, last,
`20 of 20 restarts succeed: ddp, trainer launch; 20 of 20 ...`; it exits with 1 if one did not. It does so with DDP, and
with FSDP2, whose shards come from a checkpoint that both ranks wrote.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from kills import LIMIT_S, ROWS, read_end
from rank_programs import RANK_RUN, TORCHRUN, TRAINER, Job, Nursery, free_port
from sample_records import read_starts, rows_of_steps

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


def restart(kind: tuple[str, str], number: int, folder: Path, alone: _Alone) -> list[str]:
    """Return what is wrong with a job that is killed at one of the moments and started again by its launcher.

    Args:
        kind: strategy and launcher.
        number: of the job, which chooses moment and rank.
        folder: for its files.
        alone: the end and the rows of each step of a job that was left alone.
    """
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


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first one, which chooses its moment")
    parser.add_argument("--launcher", choices=("trainer launch", "torchrun"), action="append")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), action="append")
    options = parser.parse_args(arguments)
    kinds = list(product(options.strategy or ["ddp", "fsdp"], options.launcher or ["trainer launch", "torchrun"]))
    good = Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory(prefix="restarts-") as root:
        alone = {strategy: leave_alone(strategy, Path(root, f"alone-{strategy}")) for strategy, _ in kinds}
        for number, kind in product(range(options.first, options.first + options.runs), kinds):
            began_s = time.monotonic()
            wrong = restart(kind, number, Path(root, f"{'-'.join(kind)}-{number}"), alone[kind[0]])
            good[kind] += not wrong
            place, times = MOMENTS[number % len(MOMENTS)]
            said = "".join(f"; WRONG: {each}" for each in wrong)
            name = f"{', '.join(kind)}, rank {number % 2} killed at {place} {times}"
            print(f"{name:<60} {time.monotonic() - began_s:>5.1f} s{said}", flush=True)
    print("; ".join(f"{good[kind]} of {options.runs} restarts succeed: {', '.join(kind)}" for kind in kinds))
    return 0 if all(good[kind] == options.runs for kind in kinds) else 1


def leave_alone(strategy: str, folder: Path) -> _Alone:
    """Return the end of a job that nothing happens to, and the rows of its steps, which are all, once."""
    with Nursery() as nursery:
        nursery.run(2, [folder, "--strategy", strategy], folder.with_name(f"{folder.name}-job"), LIMIT_S)
    steps = rows_of_steps(folder)
    assert sorted(row for rows in steps.values() for row in rows) == list(range(ROWS))
    return read_end(folder), steps


if __name__ == "__main__":
    sys.exit(main())
