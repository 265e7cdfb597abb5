"""Kill a rank under a launcher that may restart once, and count the jobs that end as one left alone.

`python tests/robustness/restarts.py --runs 20` does so many with `trainer launch` and with torchrun, half of those by
`--standalone` and half at a port that was given, each killed at another moment. It prints a line for each and, last,
`20 of 20 restarts succeed: trainer launch; 20 of 20 ...`; it exits with 1 if one did not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
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


def command_of(launcher: str, number: int) -> list[str]:
    """Return the launcher's part of the command line."""
    if launcher == "trainer launch":
        return [*TRAINER, "--nproc", "2", "--max_restarts", "1"]
    place = ["--standalone"] if number % 2 else ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [*TORCHRUN, *place, "--nproc-per-node=2", "--max-restarts=1"]


def restart(launcher: str, number: int, folder: Path, alone: tuple[dict[str, Any], dict[int, list[int]]]) -> list[str]:
    """Return what is wrong with a job that is killed at one of the moments and started again by its launcher."""
    place, times = MOMENTS[number % len(MOMENTS)]
    out = folder / "out"
    fault = ["--place", place, "--times", str(times), "--how", "kill", "--rank", str(number % 2)]
    with Job(folder) as job:
        job.start([*command_of(launcher, number), RANK_RUN, out, *fault])
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
    options = parser.parse_args(arguments)
    launchers, good = options.launcher or ["trainer launch", "torchrun"], Counter[str]()
    with tempfile.TemporaryDirectory(prefix="restarts-") as root:
        with Nursery() as nursery:
            nursery.run(2, [Path(root, "alone")], Path(root, "job"), LIMIT_S)
        alone = read_end(Path(root, "alone")), rows_of_steps(Path(root, "alone"))
        assert sorted(row for rows in alone[1].values() for row in rows) == list(range(ROWS))
        for number in range(options.first, options.first + options.runs):
            for launcher in launchers:
                began_s = time.monotonic()
                wrong = restart(launcher, number, Path(root, f"{launcher}-{number}"), alone)
                good[launcher] += not wrong
                place, times = MOMENTS[number % len(MOMENTS)]
                said = "".join(f"; WRONG: {each}" for each in wrong)
                name = f"{launcher}, rank {number % 2} killed at {place} {times}"
                print(f"{name:<60} {time.monotonic() - began_s:>5.1f} s{said}", flush=True)
    print("; ".join(f"{good[launcher]} of {options.runs} restarts succeed: {launcher}" for launcher in launchers))
    return 0 if set(good.values()) == {options.runs} else 1


if __name__ == "__main__":
    sys.exit(main())
